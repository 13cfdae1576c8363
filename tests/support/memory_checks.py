"""Checks what our interpreted Triton kernels do to memory: bounds, and programs that race.

Triton's interpreter reads and writes raw addresses of this process and runs the
programs of a launch in order. So a load past a block table returns whatever lies
there, and a kernel whose programs overwrite one another gives the right result. After
`install` each load and store must lie in the memory of the argument that its pointer
came from, and programs run in a shuffled order. Bytes that one program writes and
another one writes or reads are an error.

**Where a pointer came from** is kept in its upper 16 bits, which addresses do not use.
Arithmetic carries them along, and they are taken off before memory is touched. So a
load past the end of one tensor is found even where another tensor begins. Integers
that a kernel turns into pointers (tables of addresses) stand for the whole storage of
the live tensor at that address.

Kernels of other modules run unchecked. Atomic operations are refused: none of our
kernels has any. For a process whose Triton interprets (``TRITON_INTERPRET=1``); Triton
3.9.0's interpreter is what is hooked.
"""

import functools
import gc
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.quicker import unfreeze

VARIABLE = "KERNEL_MEMORY_CHECKS"
_TAG_AT = 48
_ADDRESS = (1 << _TAG_AT) - 1
# Kernels whose programs write the same value to the same place: words may end alike, with -inf.
_SAME_VALUE_WRITERS = ("exclude_bad_words_kernel",)
_SEVERAL = -1  # in place of a program: more than one has read a cell


def wanted() -> bool:
    """Whether the environment asks for the checks (``KERNEL_MEMORY_CHECKS``, on unless 0)."""
    return os.environ.get(VARIABLE, "1") != "0"


class MemoryCheckError(Exception):
    """A kernel touched memory that is not its argument's, or its programs race."""


@dataclass(frozen=True)
class Region:
    """What one pointer may be used for.

    Attributes:
        name: The kernel's argument, or how else it got the pointer.
        storage: Address and size of the tensor's storage; None where no live tensor is.
        first: Address of the first byte.
        run: Bytes that follow one another without gaps.
        strides: Pairs of bytes and size of the dimensions that leave gaps, widest first.
    """

    name: str
    storage: tuple[int, int] | None = None
    first: int = 0
    run: int = -1
    strides: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of_view(name: str, tensor: Tensor) -> "Region":
        """Exactly the elements of a tensor, not what lies between its rows."""
        size, place = tensor.element_size(), (storage_of(tensor), tensor.data_ptr())
        if tensor.numel() == 0:
            return Region(name, *place, run=0)
        dimensions = sorted(
            (abs(stride) * size, length)
            for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
            if stride != 0 and length > 1
        )
        run = extent = size
        strides: list[tuple[int, int]] = []
        for stride, length in dimensions:
            overlaps = stride < extent  # as windows do: no gaps to speak of
            extent += stride * (length - 1)
            if overlaps or (stride == run and not strides):
                run = extent
                strides.clear()
            else:
                strides.insert(0, (stride, length))
        return Region(name, *place, run, tuple(strides))

    def outside(self, address: Any, width: int) -> Any:
        """Whether accesses of ``width`` bytes leave it: of one address, or of an int64 array."""
        offset = address - self.first
        outside = offset < 0
        for stride, length in self.strides:
            index = offset // stride
            outside = outside | (index >= length)
            offset = offset - index * stride
        return outside | (offset + width > self.run)


class Marks:
    """Which programs have read and written each cell of a storage, as wide as its first access.

    Programs of a launch run in no order and nothing makes one wait for another. So what
    two of them write is one value or the other, and what one reads of another is old or
    new. The interpreter runs them one after the other, and every result looks right.
    """

    def __init__(self, storage: tuple[int, int], width: int) -> None:
        self.first, self.width = storage[0], width
        cells = -(-storage[1] // width)
        # Zeros cost no memory until they are written.
        self.readers, self.writers = np.zeros((2, cells), dtype=np.int32)
        self.written: list[np.ndarray] = []

    def cells(self, address: Any, width: int) -> np.ndarray:
        """``[accesses, cells of each]``."""
        first = np.atleast_1d((address - self.first) // self.width)
        return first[:, None] + np.arange(max(1, width // self.width))

    def read(self, cells: np.ndarray, program: int) -> None:
        before = self.readers[cells]
        same = (before == 0) | (before == program + 1)
        self.readers[cells] = np.where(same, program + 1, _SEVERAL)

    def write(self, cells: np.ndarray, program: int) -> int | None:
        """A program that wrote one of these cells before."""
        before = self.writers[cells]
        self.writers[cells] = program + 1
        self.written.append(cells.ravel())
        others = before[(before != 0) & (before != program + 1)]
        return int(others[0]) - 1 if others.size else None

    def read_of_another(self) -> tuple[int, int] | None:
        """A cell that one program writes and another one reads, and the writer."""
        if not self.written:
            return None
        cells = np.concatenate(self.written)
        readers, writers = self.readers[cells], self.writers[cells]
        [found] = ((readers != 0) & (readers != writers)).nonzero()
        return (int(cells[found[0]]), int(writers[found[0]]) - 1) if found.size else None


class Launch:
    """Regions by tag, order of programs and accesses of one launch."""

    def __init__(self, checks: "MemoryChecks", function: Any, arguments: Mapping[str, Any]) -> None:
        self.checks, self.kernel = checks, function.__name__
        self.regions = [Region("a number that is no tensor's address")]
        self.tags: dict[int, int] = {}  # by the id of an argument's tensor
        for name, value in arguments.items():
            for tensor in tensors_in(value):
                self.tags[id(tensor)] = self._add(Region.of_view(name, tensor))
        self._by_storage: dict[tuple[int, int], int] = {}
        self._marks: dict[tuple[int, int], Marks] = {}
        self.program = 0

    def _add(self, region: Region) -> int:
        self.regions.append(region)
        return len(self.regions) - 1

    def _place(self, program: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(program, self.grid)))

    def _tagged(self, numbers: np.ndarray) -> np.ndarray:
        """uint64 numbers that become pointers: tagged, if a live tensor is there."""
        tagged = numbers.copy()
        for number in map(int, np.unique(numbers)):
            # Null, or what was a tagged pointer before.
            storage = self.checks.storage_at(number) if 0 < number <= _ADDRESS else None
            if storage is None:
                continue
            if storage not in self._by_storage:
                region = Region(f"the storage at {storage[0]:#x}", storage, *storage)
                self._by_storage[storage] = self._add(region)
            tagged[numbers == number] |= np.uint64(self._by_storage[storage] << _TAG_AT)
        return tagged

    def _access(self, kind: str, pointers: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
        """The addresses of a "read" or "write" of ``width`` bytes each, without tags."""
        if pointers.size == 1 and mask.size == 1:  # the most frequent ones
            if mask.item():
                pointer = pointers.item()
                self._look_at(kind, pointer >> _TAG_AT, pointer & _ADDRESS, width)
        else:
            if pointers.shape != mask.shape:
                pointers, mask = np.broadcast_arrays(pointers, mask)
            active = pointers[mask]
            tags, addresses = active >> np.uint64(_TAG_AT), (active & _ADDRESS).astype(np.int64)
            for tag in tags[:1] if (tags == tags[:1]).all() else np.unique(tags):
                self._look_at(kind, int(tag), addresses[tags == tag], width)
        return pointers & np.uint64(_ADDRESS)

    def _look_at(self, kind: str, tag: int, address: Any, width: int) -> None:
        """Notes accesses to one region."""
        region = self.regions[tag]
        if np.any(outside := region.outside(address, width)):
            self._fail(f"{kind} outside", region, int(np.atleast_1d(address)[outside][0]))
        if np.any(odd := address % width != 0):
            self._fail(f"misaligned {kind}", region, int(np.atleast_1d(address)[odd][0]))
        assert region.storage is not None
        marks = self._marks.get(region.storage)
        if marks is None:
            marks = self._marks[region.storage] = Marks(region.storage, width)
        cells = marks.cells(address, width)
        if kind == "read":
            marks.read(cells, self.program)
            return
        writer = marks.write(cells, self.program)
        if writer is not None and self.kernel not in _SAME_VALUE_WRITERS:
            place = int(np.atleast_1d(address)[0])
            self._fail("write conflict", region, place, f", with {self._place(writer)}")

    # -- in the place of a builder's methods, with what these were -----------------------------

    def set_grid_dim(self, original: Callable, *grid: int) -> None:
        self.grid = grid
        self.order = np.arange(int(np.prod(grid)))
        if self.checks.seed is not None:
            seed = self.checks.seed, self.checks.launches
            np.random.default_rng(seed).shuffle(self.order)
        original(*grid)

    def set_grid_idx(self, original: Callable, *place: int) -> None:
        """Another program runs in the turn of this one."""
        self.program = int(self.order[np.ravel_multi_index(place, self.grid)])
        original(*self._place(self.program))

    def create_int_to_ptr(self, original: Callable, *arguments: Any) -> Any:
        pointer = original(*arguments)
        pointer.data = self._tagged(pointer.data)
        return pointer

    def create_masked_load(self, original: Callable, pointers: Any, mask: Any, *rest: Any) -> Any:
        return original(self._checked("read", pointers, mask), mask, *rest)

    def create_masked_store(
        self, original: Callable, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        return original(self._checked("write", pointers, mask), value, mask, *rest)

    def refuse(self, original: Callable, *arguments: Any) -> Any:
        raise MemoryCheckError("atomic operations are not followed: teach `memory_checks`")

    def _checked(self, kind: str, pointers: Any, mask: Any) -> Any:
        """The pointers without tags."""
        # Bytes of what a pointer points to; conditions take one.
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = self._access(kind, pointers.data, mask.data, width)
        return type(pointers)(addresses, pointers.dtype)

    def end(self) -> None:
        """Looks for what one program read and another one wrote, before or after."""
        for storage, marks in self._marks.items():
            if found := marks.read_of_another():
                cell, self.program = found
                address = storage[0] + cell * marks.width
                regions = [one for one in self.regions[1:] if not one.outside(address, 1)]
                self._fail("read conflict", regions[0], address, ", which another one reads")

    def _fail(self, what: str, region: Region, address: int, more: str = "") -> NoReturn:
        where = f"byte {address - region.first:,} of {region.run:,}"
        if region.storage is None:
            where = f"{address:#x}, where no live tensor is"
        elif region.strides:
            where = f"byte {address - region.first:,}, rows of {region.run:,} bytes"
        raise MemoryCheckError(
            f"{self.kernel}: {what} of {region.name}:"
            f" program {self._place(self.program)} at {where}{more}"
        )


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Address of its memory's first byte, and how many there are."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a kernel's argument: itself, of a tuple, under another dtype."""
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    value = getattr(value, "base", value)
    return [value] if isinstance(value, torch.Tensor) else []


@dataclass
class MemoryChecks:
    """What is checked.

    Attributes:
        own: Prefix of the modules whose kernels are checked.
        seed: Of the order of programs; None leaves the grid's order.
        launches: How many were checked.
        launch: The one that runs now; None: it is not checked.
    """

    own: str = "sequoia_vllm."
    seed: int | None = 0
    launches: int = 0
    launch: Launch | None = None
    _seen: list[weakref.ref[Tensor]] = field(default_factory=list, init=False)

    def begin(self, function: Any, arguments: Mapping[str, Any]) -> None:
        """Called before the first program of a launch, with the tensors that it will see."""
        is_own = function.__globals__.get("__name__", "").startswith(self.own)
        self.launch = Launch(self, function, arguments) if is_own else None
        self.launches += is_own

    def storage_at(self, address: int) -> tuple[int, int] | None:
        """The storage that holds the byte at ``address``; None if no live tensor's does."""
        for candidate in self._candidates():
            # Not isinstance: it asks proxies, whose objects may be gone.
            if issubclass(type(candidate), Tensor) and _has_memory(candidate):
                first, size = storage = storage_of(candidate)
                if first <= address < first + size:
                    self._seen.append(weakref.ref(candidate))
                    return storage
        return None

    def _candidates(self) -> Iterator[Any]:
        """What was found before, then what Python's collector tracks."""
        self._seen = list({id(seen()): seen for seen in self._seen if seen() is not None}.values())
        yield from [seen() for seen in self._seen]
        yield from gc.get_objects()
        if gc.get_freeze_count():  # what is frozen is not listed
            unfreeze()
            yield from gc.get_objects()


def _has_memory(tensor: Tensor) -> bool:
    """False for what has none in this process: fake, meta, sparse and wrapping tensors."""
    try:
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError, ReferenceError):
        return False


# -- the interpreter -----------------------------------------------------------------------


def install(checks: MemoryChecks) -> Callable[[], None]:
    """Hooks the interpreter; what it returns undoes that."""
    from triton.runtime import interpreter

    patch = pytest.MonkeyPatch()

    def replace(owner: Any, name: str, make: Callable, *details: Any) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, functools.wraps(original)(make(original, checks, *details)))

    replace(interpreter, "_implicit_cvt", _tagging_arguments)
    replace(interpreter.GridExecutor, "__call__", _raising_plainly)
    replace(interpreter.GridExecutor, "_init_args_hst", _beginning)
    builder = interpreter.InterpreterBuilder
    for instead in (
        Launch.set_grid_dim, Launch.set_grid_idx, Launch.create_int_to_ptr,
        Launch.create_masked_load, Launch.create_masked_store,
    ):  # fmt: skip
        replace(builder, instead.__name__, _in_launches, instead)
    for name in ("load", "store", "poll", "cas", "rmw"):
        replace(builder, f"create_atomic_{name}", _in_launches, Launch.refuse)
    return patch.undo


def _tagging_arguments(original: Callable, checks: MemoryChecks) -> Callable:
    def convert(argument: Any) -> Any:
        converted = original(argument)
        if checks.launch is not None and hasattr(argument, "data_ptr"):
            tag = checks.launch.tags[id(getattr(argument, "base", argument))]
            converted.handle.data = converted.handle.data | np.uint64(tag << _TAG_AT)
        return converted

    return convert


def _raising_plainly(original: Callable, checks: MemoryChecks) -> Callable:
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        """Takes the finding out of the errors that each level of device functions adds."""
        try:
            original(self, *args, **kwargs)
            if checks.launch is not None:
                checks.launch.end()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, MemoryCheckError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None
        finally:
            checks.launch = None

    return call


def _beginning(original: Callable, checks: MemoryChecks) -> Callable:
    def init(self: Any, args: Any, kwargs: Any) -> Any:
        hosted, named = original(self, args, kwargs)
        arguments = inspect.getcallargs(self.fn, *hosted, **named)
        checks.begin(self.fn, {k: v for k, v in arguments.items() if k not in self.constexprs})
        return hosted, named

    return init


def _in_launches(original: Callable, checks: MemoryChecks, instead: Callable) -> Callable:
    """A builder's method; ``instead`` takes the checked launch, the original, its arguments."""

    def method(self: Any, *arguments: Any) -> Any:
        if checks.launch is None:
            return original(self, *arguments)
        return instead(checks.launch, functools.partial(original, self), *arguments)

    return method
