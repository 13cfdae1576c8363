"""What is checked of a launch, and what was found: the part of `memory_checks` without hooks."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.memory_conflicts import Conflict, LaunchConflicts
from tests.support.memory_regions import LiveStorages, Region, Storage, tensors_in

OWN = ("sequoia_vllm.",)
# Kernels whose programs write the same value to the same place, with the reason.
SAME_VALUE_WRITERS: dict[str, str] = {"exclude_bad_words_kernel": "bad words may end alike: -inf"}

_TAG_BITS = 16
ADDRESS_BITS = 64 - _TAG_BITS
ADDRESS = np.uint64((1 << ADDRESS_BITS) - 1)


class MemoryCheckError(Exception):
    """A kernel touched memory that is not its argument's, or its programs race."""


@dataclass(frozen=True)
class Finding:
    """One kind of wrong access of one kernel.

    Attributes:
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
    _launch: "Launch | None" = None

    def begin(self, function: Callable, arguments: Mapping[str, Any]) -> None:
        """Called before the first program of a launch, with the tensors that it will see."""
        self._launch = Launch(self, function, arguments)
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
    def launch(self) -> "Launch":
        """The launch whose programs run now."""
        assert self._launch is not None, "memory is touched outside of a launch"
        return self._launch

    def report(self) -> str:
        """The findings, one a line."""
        return "\n".join(
            f"{finding} ({self.counts[key]} times)" for key, finding in self.findings.items()
        )


class Launch:
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
            if number == 0 or number > ADDRESS:  # null; or was a tagged pointer before
                continue
            storage = self.checks._live.find(int(number))
            if storage is None:
                continue
            if storage not in self._by_address:
                name = f"the storage at address {storage.first:#x}"
                self._by_address[storage] = self._add(Region.of_storage(name, storage))
            tagged[numbers == number] |= np.uint64(self._by_address[storage] << ADDRESS_BITS)
        return tagged

    def access(
        self, kind: str, pointers: np.ndarray, mask: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Checks a "read" or "write" of ``width`` bytes each.

        Returns the addresses without tags, and the mask without what is out of bounds.
        """
        if pointers.size == 1 and self._is_plain_read(kind, pointers, mask, width):
            return pointers & ADDRESS, mask
        if pointers.shape != mask.shape:
            pointers, mask = np.broadcast_arrays(pointers, mask)
        plain = pointers & ADDRESS
        active = pointers[mask]
        if active.size == 0:
            return plain, mask
        addresses = (active & ADDRESS).astype(np.int64)
        tags = active >> np.uint64(ADDRESS_BITS)
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
        address = pointer & int(ADDRESS)
        region = self.regions[pointer >> ADDRESS_BITS]
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
