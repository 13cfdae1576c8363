"""Times of device work, as CUDA graphs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Protocol

import torch

from benchmarks.gpu.check.machine import Machine

Work = Callable[[], object]
# Read before each timed replay. It is more than any L2 cache. Reading it takes longer than the host
# takes to launch what is timed, so the device never waits for the host.
_FLUSH_BYTES = 2 << 30
_WARM_UPS = 2


@dataclass(frozen=True)
class Time:
    """Seconds of one piece of work: the median, and the interquartile range."""

    seconds: float
    spread: float


class Timer(Protocol):
    """Measures."""

    def time(self, works: Sequence[Work]) -> Time:
        """Mean time of one of ``works``, which run one after the other."""


class GraphTimer:
    """Times replays of CUDA graphs, the L2 cache emptied before each."""

    def __init__(self, device: torch.device, replays: int = 15) -> None:
        self._replays = replays
        self._flushed = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)

    def time(self, works: Sequence[Work]) -> Time:
        """See `Timer.time`; the host's launches are not in it."""
        graph = capture(works)
        graph.replay()
        events = []
        for _ in range(self._replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # By reading: lines that were written would be written back while we time.
            torch.sum(self._flushed, dim=0, out=self._sum)
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        seconds = [start.elapsed_time(end) / 1e3 / len(works) for start, end in events]
        del graph
        return summed_up(seconds)


class OnceTimer:
    """Runs everything once, on the host's clock: where times mean nothing."""

    def time(self, works: Sequence[Work]) -> Time:
        """See `Timer.time`."""
        start = time.perf_counter()
        for work in works:
            work()
        return Time((time.perf_counter() - start) / len(works), 0.0)


def make_timer(machine: Machine) -> Timer:
    """The timer for this machine."""
    return OnceTimer() if machine.interpreted else GraphTimer(machine.device)


def capture(works: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """All of it as one CUDA graph; warmed up (and compiled) on the stream of the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            for work in works:
                work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for work in works:
            work()
    return graph


def summed_up(seconds: Sequence[float]) -> Time:
    """Median and interquartile range."""
    low, middle, high = quantiles(seconds, n=4)
    return Time(middle, high - low)


def copy_bytes_per_second(machine: Machine, timer: Timer) -> float:
    """Bandwidth of a large copy, bytes read and bytes written counted."""
    elements = 1 << (10 if machine.interpreted else 28)
    source = torch.zeros(elements, dtype=torch.float32, device=machine.device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.time([lambda: target.copy_(source)]).seconds
