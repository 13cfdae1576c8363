"""vLLM's `CuMemAllocator`, on this machine's memory: what sleep keeps, and what it throws away.

Memory belongs to the pool that is open when an operator takes it, as on a GPU; of pools that lie
within one another, to the inner one. What sleep does not keep holds poison from then on: what is
mapped there when the engine wakes may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_stand_in.graphs import address_of, tensors_in

_NAN = 0xFF  # in all bytes of floats, and of caches, whose memory has no type yet
_FAR_OUT = 0xB3  # of integers: in no table


@dataclass
class _Pool:
    tag: str
    made: dict[int, tuple[StorageWeakRef, bool]] = field(default_factory=dict)
    """By address: the memory, and whether it was made for floats."""


class _Taking(TorchDispatchMode):
    """Notes what operators take from the allocator's innermost pool."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self._allocator = allocator

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {address_of(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if address_of(tensor) not in given:
                self._allocator.note(tensor)
        return result


class Allocator:
    """In the place of `CuMemAllocator`'s only instance."""

    def __init__(self) -> None:
        self._pools: list[_Pool] = []
        self._open: list[_Pool] = []

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        pool = _Pool(tag)
        self._pools.append(pool)
        self._open.append(pool)
        try:
            with _Taking(self) if len(self._open) == 1 else nullcontext():
                yield
        finally:
            self._open.remove(pool)

    def note(self, tensor: Tensor) -> None:
        memory = StorageWeakRef(tensor.untyped_storage()), tensor.is_floating_point()
        self._open[-1].made[address_of(tensor)] = memory

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        """Keeps what has one of these tags, and throws away the rest."""
        for pool in self._pools:
            if pool.tag not in offload_tags:
                for memory, is_float in _used(pool):
                    memory.fill_(_NAN if is_float or pool.tag == "kv_cache" else _FAR_OUT)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing: what was kept has stayed where it was."""

    def get_current_usage(self) -> int:
        """None, as vLLM asks before it loads a model."""
        return 0

    def release_pools(self) -> None:
        self._pools.clear()

    def holds(self, tensor: Tensor, tag: str) -> bool:
        return any(
            memory.data_ptr() == address_of(tensor)
            for pool in self._pools
            if pool.tag == tag
            for memory, _ in _used(pool)
        )


def install() -> Allocator:
    """For engines that may sleep; others ask for no allocator."""
    from vllm.device_allocator import cumem

    cumem.cumem_available = True
    cumem.CuMemAllocator.instance = allocator = Allocator()
    return allocator


def _used(pool: _Pool) -> Iterator[tuple[Tensor, bool]]:
    """What is not given back yet: all of its bytes, and whether it was made for floats."""
    for reference, is_float in pool.made.values():
        if not reference.expired():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            yield torch.empty(0, dtype=torch.uint8).set_(storage), is_float
