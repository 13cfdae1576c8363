"""Checks what interpreted Triton kernels do to memory: bounds, and programs that race.

Triton's interpreter reads and writes raw addresses of this process and runs the
programs of a launch in order, so a load past a block table returns whatever lies
there, and a kernel whose programs overwrite one another gives the right result. With
`memory_checks` (or `install`) each load and store must lie in the memory of the
argument that its pointer came from, programs run in a shuffled order, and bytes that
one program writes and another writes or reads are findings.

**Where a pointer came from** is kept in its upper 16 bits, which addresses do not use:
arithmetic carries them along, and they are taken off before memory is touched. So a
load past the end of one tensor is found even where another tensor begins. Integers
that a kernel turns into pointers (tables of addresses) stand for the whole storage of
the live tensor at that address.

Kernels of `own` modules (prefixes of module names) may touch exactly the elements of
the views they were given, and a finding raises. The others may touch the views' whole
storages, and findings are collected in `MemoryChecks.findings`.

To be installed in a process whose Triton interprets (``TRITON_INTERPRET=1``); Triton
3.9.0's interpreter is what is hooked.
"""

import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.gpu_rehearsal.memory_conflicts import Conflict, LaunchConflicts
from tests.gpu_rehearsal.memory_regions import LiveStorages, Region, Storage, tensors_in

OWN = ("sequoia_vllm.",)
# Kernels whose programs write the same value to the same place, with the reason.
SAME_VALUE_WRITERS: dict[str, str] = {}
VARIABLE = "KERNEL_MEMORY_CHECKS"

_TAG_BITS = 16
_ADDRESS_BITS = 64 - _TAG_BITS
_ADDRESS = np.uint64((1 << _ADDRESS_BITS) - 1)


class MemoryCheckError(Exception):
    """A kernel touched memory that is not its argument's, or its programs race."""


@dataclass(frozen=True)
class Finding:
    """One kind of wrong access of one kernel.

    Attributes:
        kernel: Module and name.
        kind: "read outside", "misaligned read" or "read conflict"; of writes likewise.
        argument: Whose memory was meant.
        details: Programs, offset in bytes from the argument's first, what is there.
    """

    kernel: str
    kind: str
    argument: str
    details: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.kind} of {self.argument}: {self.details}"


@dataclass
class MemoryChecks:
    """What is checked, and what was found.

    Attributes:
        own: Prefixes of the modules whose kernels are checked strictly.
        shuffle_seed: Of the order of programs; None leaves the grid's order.
        same_value_writers: Kernels whose write conflicts are no findings, with reasons.
        findings: The first of each kernel, kind and argument, how often it was found.
        launches: How many were checked, by kernel.
    """

    own: Sequence[str] = OWN
    shuffle_seed: int | None = 0
    same_value_writers: Mapping[str, str] = field(default_factory=lambda: SAME_VALUE_WRITERS)
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    _live: LiveStorages = field(default_factory=LiveStorages)
    _launch: "_Launch | None" = None

    def begin(self, function: Callable, arguments: Mapping[str, Any]) -> None:
        """Called before the first program of a launch, with the tensors that it will see."""
        self._launch = _Launch(self, function, arguments)
        self.launches[self._launch.kernel] += 1

    def end(self) -> None:
        """Called after the last program."""
        launch, self._launch = self._launch, None
        if launch is not None:
            launch.look_for_read_conflicts()

    def abandon(self) -> None:
        """Called when a launch has raised."""
        self._launch = None

    @property
    def launch(self) -> "_Launch":
        """The launch whose programs run now."""
        assert self._launch is not None, "memory is touched outside of a launch"
        return self._launch

    def report(self) -> str:
        """The findings, one a line."""
        return "\n".join(
            f"{finding} ({self.counts[key]} times)" for key, finding in self.findings.items()
        )


class _Launch:
    """Regions by tag, order of programs and accesses of one launch."""

    def __init__(
        self, checks: MemoryChecks, function: Callable, arguments: Mapping[str, Any]
    ) -> None:
        self.checks = checks
        module = function.__globals__.get("__name__", "")
        self.name = function.__name__
        self.kernel = f"{module}.{self.name}"
        self.is_own = module.startswith(tuple(checks.own))
        self.regions = [Region.nowhere("a number that is no tensor's address")]
        self.tags: dict[int, int] = {}  # by the id of an argument's tensor
        self._by_address: dict[Storage, int] = {}
        for name, value in arguments.items():
            for tensor_name, tensor in tensors_in(value, name):
                region = (
                    Region.of_view(tensor_name, tensor)
                    if self.is_own
                    else Region.of_storage(tensor_name, Storage.of(tensor))
                )
                self.tags[id(tensor)] = self._add(region)
        self.program = 0
        self.grid = (1, 1, 1)
        self.order = np.arange(1)
        self.in_atomic = False
        self.conflicts = LaunchConflicts()

    def _add(self, region: Region) -> int:
        self.regions.append(region)
        return len(self.regions) - 1

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        self.grid = grid
        self.order = np.arange(int(np.prod(grid)))
        if self.checks.shuffle_seed is not None:
            seed = (self.checks.shuffle_seed, sum(self.checks.launches.values()))
            np.random.default_rng(seed).shuffle(self.order)

    def start_program(self, x: int, y: int, z: int) -> tuple[int, int, int]:
        """Which program runs in the turn of another one."""
        _, height, depth = self.grid
        self.program = int(self.order[(x * height + y) * depth + z])
        return self._place(self.program)

    def _place(self, program: int) -> tuple[int, int, int]:
        _, height, depth = self.grid
        return program // (height * depth), program // depth % height, program % depth

    def tag_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """uint64 numbers that become pointers: tagged, if a live tensor is there."""
        tagged = numbers.copy()
        for number in np.unique(numbers):
            if number == 0 or number > _ADDRESS:  # null; or was a tagged pointer before
                continue
            storage = self.checks._live.find(int(number))
            if storage is None:
                continue
            if storage not in self._by_address:
                name = f"the storage at address {storage.first:#x}"
                self._by_address[storage] = self._add(Region.of_storage(name, storage))
            tagged[numbers == number] |= np.uint64(self._by_address[storage] << _ADDRESS_BITS)
        return tagged

    def access(
        self, kind: str, pointers: np.ndarray, mask: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Checks a "read" or "write" of ``width`` bytes each.

        Returns the addresses without tags, and the mask without what is out of bounds.
        """
        if pointers.size == 1 and self._is_plain_read(kind, pointers, mask, width):
            return pointers & _ADDRESS, mask
        if pointers.shape != mask.shape:
            pointers, mask = np.broadcast_arrays(pointers, mask)
        plain = pointers & _ADDRESS
        active = pointers[mask]
        if active.size == 0:
            return plain, mask
        addresses = (active & _ADDRESS).astype(np.int64)
        tags = active >> np.uint64(_ADDRESS_BITS)
        outside = np.zeros(active.shape, dtype=bool)
        for tag in tags[:1] if (tags == tags[0]).all() else np.unique(tags):
            lanes = tags == tag
            outside[lanes] = self._look_at(kind, self.regions[int(tag)], addresses[lanes], width)
        if outside.any():
            mask = mask.copy()
            mask[mask] = ~outside
        return plain, mask

    def _is_plain_read(self, kind: str, pointers: np.ndarray, mask: np.ndarray, width: int) -> bool:
        """Takes the most frequent access by a short way: one number, and nothing is wrong."""
        if kind != "read" or self.in_atomic or mask.size != 1 or not mask.item():
            return False
        pointer = int(pointers.item())
        address = pointer & int(_ADDRESS)
        region = self.regions[pointer >> _ADDRESS_BITS]
        if address % width or not region.holds(address, width):
            return False
        self.conflicts.read_one(region, address, width, self.program)
        return True

    def _look_at(self, kind: str, region: Region, addresses: np.ndarray, width: int) -> np.ndarray:
        """Notes accesses to one region; which of them are outside of it."""
        outside = region.outside(addresses, width)
        if outside.any():
            self._found_outside(kind, region, int(addresses[outside.argmax()]), width)
            addresses = addresses[~outside]
        misaligned = addresses & (width - 1)
        if misaligned.any():
            self._found_misaligned(kind, region, int(addresses[misaligned.argmax()]), width)
        if addresses.size:
            self._note(kind, region, addresses, width)
        return outside

    def _note(self, kind: str, region: Region, addresses: np.ndarray, width: int) -> None:
        if kind == "read":
            if not self.in_atomic:
                self.conflicts.read(region, addresses, width, self.program)
            return
        conflict = self.conflicts.write(region, addresses, width, self.program, self.in_atomic)
        if conflict is not None and self.name not in self.checks.same_value_writers:
            self._found_conflict(conflict)

    def look_for_read_conflicts(self) -> None:
        for conflict in self.conflicts.read_conflicts():
            self._found_conflict(conflict)

    def _found_outside(self, kind: str, region: Region, address: int, width: int) -> None:
        details = f"{width} bytes by program {self._place(self.program)}"
        if region.storage is None:
            details += f" at {address:#x}, where no live tensor is"
        else:
            details += (
                f" at byte {address - region.first:,} of {region.extent:,}"
                f"{' (between rows)' if 0 <= address - region.first < region.extent else ''}"
            )
        self._found(f"{kind} outside", region, details)

    def _found_misaligned(self, kind: str, region: Region, address: int, width: int) -> None:
        details = f"{width} bytes by program {self._place(self.program)} at {address:#x}"
        self._found(f"misaligned {kind}", region, details)

    def _found_conflict(self, conflict: Conflict) -> None:
        writer = (
            "atomic operations"
            if conflict.writer < 0
            else f"program {self._place(conflict.writer)}"
        )
        self._found(
            f"{conflict.kind} conflict",
            conflict.region,
            f"program {self._place(conflict.program)} {conflict.kind}s byte"
            f" {conflict.address - conflict.region.first:,}, which {writer} writes",
        )

    def _found(self, kind: str, region: Region, details: str) -> None:
        key = (self.kernel, kind, region.name)
        finding = Finding(self.kernel, kind, region.name, details)
        self.checks.findings.setdefault(key, finding)
        self.checks.counts[key] += 1
        if self.is_own:
            raise MemoryCheckError(str(finding))


_installed: "tuple[MemoryChecks, list[tuple[Any, str, Any]]] | None" = None


def install(checks: MemoryChecks | None = None) -> MemoryChecks:
    """Hooks the interpreter until `uninstall`.

    Raises:
        RuntimeError: If it is hooked already.
    """
    global _installed
    if _installed is not None:
        raise RuntimeError("memory checks are installed already")
    checks = MemoryChecks() if checks is None else checks
    originals: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Callable[[Callable, MemoryChecks], Callable]) -> None:
        original = getattr(owner, name)
        originals.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(make(original, checks)))

    from triton.runtime import interpreter

    replace(interpreter, "_implicit_cvt", _tagging_arguments)
    replace(interpreter.GridExecutor, "__call__", _raising_plainly)
    replace(interpreter.GridExecutor, "_init_args_hst", _beginning)
    replace(interpreter.GridExecutor, "_restore_args_dev", _ending)
    builder = interpreter.InterpreterBuilder
    replace(builder, "set_grid_dim", _with_grid)
    replace(builder, "set_grid_idx", _with_program)
    replace(builder, "create_int_to_ptr", _tagging_numbers)
    replace(builder, "create_masked_load", _checked_load)
    replace(builder, "create_masked_store", _checked_store)
    for name in ("create_atomic_load", "create_atomic_store", "create_atomic_poll"):
        replace(builder, name, _atomic_access)
    replace(builder, "create_atomic_cas", _checked_exchange)
    replace(builder, "create_atomic_rmw", _checked_update)
    _installed = checks, originals
    return checks


def uninstall() -> None:
    """Leaves the interpreter as it was; nothing if it is not hooked."""
    global _installed
    if _installed is not None:
        for owner, name, original in reversed(_installed[1]):
            setattr(owner, name, original)
        _installed = None


@contextmanager
def memory_checks(checks: MemoryChecks | None = None) -> Iterator[MemoryChecks]:
    """The interpreter hooked for as long as the context lasts."""
    installed = install(checks)
    try:
        yield installed
    finally:
        uninstall()


def wanted() -> bool:
    """Whether the environment asks for the checks (``KERNEL_MEMORY_CHECKS``, on unless 0)."""
    return os.environ.get(VARIABLE, "1") != "0"


def _tagging_arguments(original: Callable, checks: MemoryChecks) -> Callable:
    def convert(argument: Any) -> Any:
        converted = original(argument)
        if not hasattr(argument, "data_ptr"):
            return converted
        tag = checks.launch.tags.get(id(getattr(argument, "base", argument)))
        if tag is not None:
            converted.handle.data = converted.handle.data | np.uint64(tag << _ADDRESS_BITS)
        return converted

    return convert


def _raising_plainly(original: Callable, checks: MemoryChecks) -> Callable:
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        """Takes the finding out of the errors that each level of device functions adds."""
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            checks.abandon()
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, MemoryCheckError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None

    return call


def _beginning(original: Callable, checks: MemoryChecks) -> Callable:
    def init(self: Any, args: Any, kwargs: Any) -> Any:
        hosted, hosted_kwargs = original(self, args, kwargs)
        arguments = inspect.getcallargs(self.fn, *hosted, **hosted_kwargs)
        pointers = {k: v for k, v in arguments.items() if k not in self.constexprs}
        checks.begin(self.fn, pointers)
        return hosted, hosted_kwargs

    return init


def _ending(original: Callable, checks: MemoryChecks) -> Callable:
    def restore(self: Any, *args: Any) -> None:
        original(self, *args)
        checks.end()

    return restore


def _with_grid(original: Callable, checks: MemoryChecks) -> Callable:
    def set_grid_dim(self: Any, *grid: int) -> None:
        checks.launch.set_grid(grid)  # type: ignore[arg-type]
        original(self, *grid)

    return set_grid_dim


def _with_program(original: Callable, checks: MemoryChecks) -> Callable:
    return lambda self, *place: original(self, *checks.launch.start_program(*place))


def _tagging_numbers(original: Callable, checks: MemoryChecks) -> Callable:
    def create(self: Any, source: Any, destination: Any) -> Any:
        pointer = original(self, source, destination)
        pointer.data = checks.launch.tag_numbers(pointer.data)
        return pointer

    return create


def _untagged(handle: Any, addresses: np.ndarray) -> Any:
    return type(handle)(addresses, handle.dtype)


def _width(handle: Any) -> int:
    """Bytes of what a pointer points to; conditions take one."""
    return max(1, handle.get_element_ty().primitive_bitwidth // 8)


def _checked_load(original: Callable, checks: MemoryChecks) -> Callable:
    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        addresses, inside = checks.launch.access("read", pointers.data, mask.data, _width(pointers))
        return original(
            self, _untagged(pointers, addresses), _untagged(mask, inside), *rest, **named
        )

    return load


def _checked_store(original: Callable, checks: MemoryChecks) -> Callable:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses, inside = checks.launch.access(
            "write", pointers.data, mask.data, _width(pointers)
        )
        return original(self, _untagged(pointers, addresses), value, _untagged(mask, inside), *rest)

    return store


def _atomic_access(original: Callable, checks: MemoryChecks) -> Callable:
    def access(self: Any, *args: Any) -> Any:
        checks.launch.in_atomic = True
        try:
            return original(self, *args)
        finally:
            checks.launch.in_atomic = False

    return access


def _checked_exchange(original: Callable, checks: MemoryChecks) -> Callable:
    def exchange(self: Any, pointers: Any, *rest: Any) -> Any:
        launch = checks.launch
        launch.in_atomic = True
        everywhere = np.ones(pointers.data.shape, dtype=bool)
        addresses, inside = launch.access("write", pointers.data, everywhere, _width(pointers))
        launch.in_atomic = False
        if not inside.all():
            raise MemoryCheckError(f"{launch.kernel}: atomic exchange outside of its argument")
        return original(self, _untagged(pointers, addresses), *rest)

    return exchange


def _checked_update(original: Callable, checks: MemoryChecks) -> Callable:
    def update(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch = checks.launch
        launch.in_atomic = True
        addresses, inside = launch.access("write", pointers.data, mask.data, _width(pointers))
        launch.in_atomic = False
        return original(
            self, operation, _untagged(pointers, addresses), value, _untagged(mask, inside), *rest
        )

    return update
