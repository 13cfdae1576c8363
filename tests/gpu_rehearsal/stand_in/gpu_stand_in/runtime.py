"""`torch.cuda` and `torch.accelerator` without a GPU: streams, events, memory, devices.

All work is done when it is called, so streams and events order nothing; but copies to
the device on a stream that is `late` are done when it is waited for, and copies between
host and device are under account until the host has waited (`copies`).
What the CUDA runtime forbids while a graph is captured raises here, too.
"""

from __future__ import annotations

import itertools
import os
import time
import types
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import psutil
import torch

from gpu_stand_in import graphs
from tests.gpu_rehearsal import host_copies

NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
DEVICES = 2
PROCESSORS = 4

_numbers = itertools.count(1)

copies = host_copies.HostCopies()
"""Copies that do not wait: they are under way until the host does."""
copies.is_capturing = lambda: graphs.capturing() is not None
copies.run = lambda target, source: _current.copy(target, source)


def synchronise(what: str, mark: int | None = None) -> None:
    """The host waits for the device: for all, or for what was asked for up to `mark`."""
    graphs.refuse_while_capturing(what)
    if mark is None:
        for stream in list(_late_streams):
            stream.run()
    with torch.inference_mode():
        copies.wait(mark)


# -- streams and events --------------------------------------------------------------------


class Stream:
    """An order of work, which here has none: but for copies, where the stream is `late`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = self.cuda_stream = next(_numbers)
        self.device = torch.device("cpu")
        self.device_index = 0
        self.asked = self.done = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> Stream:
        self._outer = current_stream()
        torch.cuda.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._outer)

    def make_late(self) -> None:
        """For streams that only copy to the device: it is done when somebody waits for it."""
        _late_streams.add(self)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``target.copy_(source)``; until it is done ``target`` holds poison."""
        if self not in _late_streams:
            torch.ops.aten.copy_(target, source)
            return
        target.fill_(float("nan"))
        self._copies.append((target, source))
        self.asked += 1

    def run(self, until: int | None = None) -> None:
        """Does what was asked for, or the first so many of it."""
        with torch.inference_mode():
            while self._copies and (until is None or self.done < until):
                torch.ops.aten.copy_(*self._copies.pop(0))
                self.done += 1

    def wait_stream(self, stream: Stream) -> None:
        stream.run()

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.run()
        synchronise("Stream.synchronize")

    def query(self) -> bool:
        graphs.refuse_while_capturing("Stream.query")
        return True


class Event:
    """A point in a stream. Its first query is answered with no: the device is a step behind."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0
        self._asked = False
        self._mark = 0
        self._stream, self._copies = _default, 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._copies = self._stream.asked
        self._time = time.perf_counter()
        self._asked = False
        self._mark = copies.mark()

    def wait(self, stream: Stream | None = None) -> None:
        self._stream.run(self._copies)

    def synchronize(self) -> None:
        self.wait()
        synchronise("Event.synchronize", self._mark)

    def query(self) -> bool:
        graphs.refuse_while_capturing("Event.query")
        asked, self._asked = self._asked, True
        if asked:
            synchronise("Event.query", self._mark)
        return asked

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        return (other._time - self._time) * 1e3


class _StreamContext:
    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> _StreamContext:
        self._outer = current_stream()
        torch.cuda.set_stream(self._stream or self._outer)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._outer)


_late_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_default = Stream()
_current = _default


def current_stream(device: Any = None) -> Stream:
    return _current


def set_stream(stream: Stream) -> None:
    """Replaces torch's; vLLM wraps it, and calls it from there."""
    global _current
    _current = stream


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_numbers)


# -- memory ----------------------------------------------------------------------------------

_resident_at_start = 0
_most_resident = 0


def total_memory() -> int:
    """Bytes of the device, from GPU_STAND_IN_MIB."""
    return int(os.environ.get("GPU_STAND_IN_MIB", "640")) << 20


def forget_memory() -> None:
    """What the process holds now does not count: Python, torch, vLLM."""
    global _resident_at_start, _most_resident
    _resident_at_start, _most_resident = psutil.Process().memory_info().rss, 0


def used_memory() -> int:
    """What the process has taken at most, up to half the device: the rest is for the cache.

    Never less than before: vLLM refuses to start where memory is freed while it measures.
    """
    global _most_resident
    taken = psutil.Process().memory_info().rss - _resident_at_start
    _most_resident = max(_most_resident, taken, 0)
    return min(_most_resident, total_memory() // 2)


def _memory_info(*_: Any, **__: Any) -> tuple[int, int]:
    graphs.refuse_while_capturing("a question for free memory")
    return total_memory() - used_memory(), total_memory()


def _memory_stats(*_: Any, **__: Any) -> dict[str, int]:
    used = used_memory()
    return {"allocated_bytes.all.peak": used + (8 << 20), "allocated_bytes.all.current": used}


# -- installation ------------------------------------------------------------------------------


def _constant(value: Any) -> Callable[..., Any]:
    """A function of its own each time: Dynamo refuses one object under two names of torch."""
    return lambda *_, **__: value


def _synchronising(what: str) -> Callable[..., None]:
    return lambda *_, **__: synchronise(what)


def _properties() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=total_memory(),
        multi_processor_count=PROCESSORS, is_integrated=False, warp_size=32,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        max_threads_per_multi_processor=2048, L2_cache_size=50 << 20, uuid="stand-in",
        gcnArchName="", clock_rate=1, regs_per_multiprocessor=65536,
    )  # fmt: skip


@cache
def install() -> None:
    """Replaces the functions, once."""
    for module, name in ((torch.cuda, "cuda"), (torch.accelerator, "accelerator")):
        _install_common(module, name)
    _install_cuda(torch.cuda)
    _install_accelerator(torch.accelerator)
    torch.Event, torch.Stream = Event, Stream
    torch.Tensor.record_stream = _constant(None)
    host_copies.install(copies)
    graphs.hook_triton()


def _install_common(module: Any, name: str) -> None:
    module.synchronize = _synchronising(f"{name}.synchronize")
    module.empty_cache = _synchronising(f"{name}.empty_cache")
    module.device_count = _constant(DEVICES)
    module.memory_stats = lambda *_, **__: _memory_stats()
    module.reset_peak_memory_stats = _constant(None)
    for function in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(module, function, lambda *_, **__: used_memory())


def _install_cuda(cuda: Any) -> None:
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = current_stream
    cuda.default_stream = _constant(_default)
    cuda.set_stream = set_stream
    cuda.stream = cuda.StreamContext = _StreamContext
    cuda.current_device = _constant(0)
    cuda.get_device_capability = _constant(CAPABILITY)
    cuda.get_device_properties = lambda device=None: _properties()
    cuda.get_device_name = _constant(NAME)
    cuda.mem_get_info = lambda *_, **__: _memory_info()
    cuda.memory.get_allocator_backend = _constant("stand-in")
    cuda.graph_pool_handle = graph_pool_handle
    cuda.is_current_stream_capturing = lambda: graphs.capturing() is not None
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = graphs.CUDAGraph
    cuda.graph = cuda.graphs.graph = graphs.graph
    cuda.get_sync_debug_mode = _constant(0)
    for name in ("set_device", "current_blas_handle", "set_sync_debug_mode"):
        setattr(cuda, name, _constant(None))


def _install_accelerator(accelerator: Any) -> None:
    accelerator.get_memory_info = lambda *_, **__: _memory_info()
    accelerator.current_device_index = _constant(0)
    accelerator.current_stream = lambda *_: current_stream()
    accelerator.set_stream = lambda stream: torch.cuda.set_stream(stream)
    for name in ("set_device_index", "empty_host_cache"):
        setattr(accelerator, name, _constant(None))
