"""Copies between host and device that are still under way when the host goes on.

Where all tensors are the CPU's, a copy with ``non_blocking`` is done when it is called.
On a GPU it is done some time before the next wait, and in between

- pinned memory that is being read must not change: the device gets what is there when
  it comes to it;
- pinned memory that is being written holds anything: here it holds NaN (integers -77)
  until the host has waited;
- a buffer that the device reads in place (UVA) must not be handed out again.

`HostCopies` keeps account of them, `install` hooks torch. The stand-ins for events
take a `mark` where they are recorded and `wait` for it where they were waited for, or
answered a query with yes; other synchronisations wait for everything. Copies from
memory that is not pinned are done when the call returns, on GPUs too.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

_FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "empty_strided",
)  # fmt: skip
_INPUTS = "vllm/multimodal/inputs.py"  # what it leaves on the host has come from there
_copy = Tensor.copy_


class HostMemoryError(Exception):
    """The host touched memory that a copy under way reads, or was about to."""


@dataclass
class _Pending:
    """A copy under way: a read of ``host`` has a ``snapshot``, a write to it ``values``."""

    number: int
    host: Tensor
    where: str
    snapshot: Tensor | None = None
    values: Tensor | None = None


class HostCopies:
    """What is under way.

    Attributes:
        number: Of the last copy or hand-out.
        waited: The host has waited for all up to this number.
        watches_buffers: Whether buffers that are handed out again too early are an error.
        is_capturing: Whether a CUDA graph is being captured, which copies nothing.
        run: Copies pinned memory to the device; may do so later, when a stream is waited for.
    """

    def __init__(self) -> None:
        self.number = 0
        self.waited = 0
        self._pending: list[_Pending] = []
        self._pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # With the owner, so that its id stays its own.
        self._handed_out: dict[tuple[int, object], tuple[int, object]] = {}
        self.watches_buffers = True
        self.is_capturing: Callable[[], bool] = lambda: False
        self.run: Callable[[Tensor, Tensor], object] = _copy

    # -- pinned memory -----------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._pinned[storage.data_ptr()] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return self._pinned.get(storage.data_ptr()) is storage

    # -- copies ------------------------------------------------------------------------

    def copy(self, target: Tensor, source: Tensor) -> Tensor:
        """``target.copy_(source, non_blocking=True)``."""
        self.number += 1
        if self.is_pinned(source):
            self.run(target, source)
            pending = _Pending(self.number, source, _caller(), snapshot=source.clone())
        elif self.is_pinned(target):
            pending = _Pending(self.number, target, _caller(), values=_copy(target, source).clone())
            _poison(target)
        else:
            return _copy(target, source)
        self._pending.append(pending)
        return target

    def hand_out(self, owner: object, place: object) -> None:
        """A buffer that the device reads in place is written and given to it.

        Raises:
            HostMemoryError: If it was handed out before and not waited for since.
        """
        if not self.watches_buffers:
            return
        key = id(owner), place
        if self._handed_out.get(key, (0, owner))[0] > self.waited:
            raise HostMemoryError(f"{_caller()}: buffer {place} is written while the device reads")
        self.number += 1
        self._handed_out[key] = self.number, owner

    @contextmanager
    def buffers_unwatched(self) -> Iterator[None]:
        """Within it buffers may be handed out again: nobody looks at what comes of it."""
        before, self.watches_buffers = self.watches_buffers, False
        try:
            yield
        finally:
            self.watches_buffers = before

    # -- waiting -----------------------------------------------------------------------

    def mark(self) -> int:
        """What an event that is recorded now stands for."""
        self.number += 1
        return self.number

    def wait(self, mark: int | None = None) -> None:
        """The host has waited for a recorded event, or for all.

        Raises:
            HostMemoryError: If a copy's source is no longer what it was.
        """
        mark = self.number if mark is None else mark
        self.waited = max(self.waited, mark)
        done = [copy for copy in self._pending if copy.number <= mark]
        self._pending = [copy for copy in self._pending if copy.number > mark]
        for copy in done:
            if copy.values is not None:
                _copy(copy.host, copy.values)
            elif not _same_bytes(copy.host, copy.snapshot):
                raise HostMemoryError(f"{copy.where}: host memory changed before its copy was done")


def _same_bytes(one: Tensor, other: Tensor | None) -> bool:
    assert other is not None
    octets = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*octets)


def _poison(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(-77 % (1 << 8) if tensor.dtype == torch.uint8 else -77)


def _caller() -> str:
    """File and line outside of this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def install(copies: HostCopies) -> pytest.MonkeyPatch:
    """Hooks torch, after other replacements of its functions; the patch may be undone."""
    patch = pytest.MonkeyPatch()

    def replace(owner: Any, name: str, make: Callable[[Any, HostCopies], Callable]) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, functools.wraps(original)(make(original, copies)))

    for name in _FACTORIES:
        replace(torch, name, _pinning)
    replace(Tensor, "pin_memory", lambda _, c: lambda self, *a, **k: c.pin(self.clone()))
    replace(Tensor, "is_pinned", lambda _, c: lambda self, *a, **k: c.is_pinned(self))
    replace(Tensor, "copy_", _copying)
    replace(Tensor, "to", _moving)
    return patch


def watch_pools(pools: Any, copies: HostCopies) -> None:
    """vLLM's `UvaBufferPool`: its buffers take turns, with nothing that waits for the device."""
    original = pools.copy_to_uva

    @functools.wraps(original)
    def copy_to_uva(self: Any, values: Any) -> Tensor:
        copies.hand_out(self, (self._curr + 1) % self.max_concurrency)
        return original(self, values)

    pools.copy_to_uva = copy_to_uva


def _pinning(original: Callable, copies: HostCopies) -> Callable:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = original(*args, **kwargs)
        return copies.pin(made) if pin_memory else made

    return make


def _copying(original: Callable, copies: HostCopies) -> Callable:
    def copy_(self: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
        if non_blocking and isinstance(source, Tensor) and not copies.is_capturing():
            return copies.copy(self, source)
        return original(self, source)

    return copy_


def _moving(original: Callable, copies: HostCopies) -> Callable:
    """Pinned memory goes to the device, other tensors to the host named "cpu"."""

    def to(self: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        # Not an object of torch.device, which may be the stand-in's device.
        where = kwargs.get("device", args[0] if args else None)
        to_host = isinstance(where, str) and where == "cpu" and _INPUTS not in _caller()
        if not non_blocking or not (to_host or copies.is_pinned(self)):
            return original(self, *args, **kwargs)
        source = original(self, *args, **kwargs)
        if source.dtype != self.dtype:  # a kernel's work: the copy is of what it made
            return source
        target = torch.empty_like(source)
        return copies.copy(copies.pin(target) if not copies.is_pinned(self) else target, self)

    return to
