"""What the check of kernels works with: a device, and times of what it does as CUDA graphs."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import quantiles
from typing import Any

import torch

from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.item_run import ItemRun

Work = Callable[[], object]
# Read before each timed replay. It is more than any L2 cache. Reading it takes longer than the host
# takes to launch what is timed, so the device never waits for the host.
_FLUSH_BYTES = 2 << 30
_WARM_UPS, _REPLAYS = 2, 15


class KernelRun:
    """An item's run, with the device and its times."""

    def __init__(self, run: ItemRun) -> None:
        self.machine = Machine.find(run.tiny)
        self.tiny = run.tiny
        self._run = run
        if not self.machine.interpreted:
            device = self.machine.device
            self._flushed = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Keeps a failure from ending the check: time on a GPU is short, and the rest counts."""
        with self._run.attempt(what):
            yield
        if not self.machine.interpreted:
            torch.cuda.empty_cache()

    def check(self, name: str, error: float, limit: float) -> None:
        """Keeps a comparison; one that is wrong is an error of the run, and NaN is wrong."""
        self._run.record(name, {"error": error if error < 1e30 else 1e30, "limit": limit})
        with self._run.attempt(name):
            assert error <= limit, f"wrong by {error:.3g}, at most {limit:.3g} is right"

    def time(self, name: str, works: Sequence[Work], **more: Any) -> None:
        """Times a part of a step as `seconds` does, and keeps it with what ``more`` says."""
        seconds, spread = self.seconds(works)
        self._run.record(name, {"seconds": seconds, "spread": spread, **more})

    def seconds(self, works: Sequence[Work]) -> tuple[float, float]:
        """Times ``works``, which run one after the other, in replays of a CUDA graph, with the L2
        cache emptied before each. The host's launches are not in it. Under the interpreter, where
        times mean nothing, they run once.

        Returns:
            Seconds of one of them: the median of the replays, and the interquartile range.
        """
        if self.machine.interpreted:
            begun = time.perf_counter()
            _run_all(works)
            return (time.perf_counter() - begun) / len(works), 0.0
        graph = _capture(works)
        events = []
        total = torch.zeros((), dtype=torch.float32, device=self.machine.device)
        graph.replay()
        for _ in range(_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # By reading: lines that were written would be written back while we time.
            torch.sum(self._flushed, dim=0, out=total)
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        low, middle, high = quantiles(
            [start.elapsed_time(end) / 1e3 / len(works) for start, end in events], n=4
        )
        return middle, high - low

    def copy_bytes_per_second(self) -> float:
        """Bandwidth of a large copy, bytes read and bytes written counted."""
        elements = 1 << (10 if self.machine.interpreted else 28)
        source = torch.zeros(elements, dtype=torch.float32, device=self.machine.device).normal_()
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds([lambda: target.copy_(source)])[0]


def _capture(works: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """All of it as one CUDA graph; warmed up (and compiled) on the stream of the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            _run_all(works)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _run_all(works)
    return graph


def _run_all(works: Sequence[Work]) -> None:
    for work in works:
        work()
