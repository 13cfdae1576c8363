"""Buffers that layers' weights are read into, ahead of the layer that is computed.

Also an allocator setting for the activations of wide layers, which stand beside the buffers.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent import futures
from contextlib import suppress
from itertools import chain

import torch

from sequoia_vllm.engine.offload.weight_file import OffloadError, Region, WeightFile

THREADS = 4
"""Reads under way at once: one at a time leaves a disk idle between them."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_NEVER = -1


class LayerRing:
    """Reads layers in the order in which they are computed, over and over.

    Layer i always lies in buffer ``i % buffers``, so that a weight's address never changes.
    Threads read as far ahead as buffers are free. One thread computes, and calls this.

    Args:
        regions: The region of each layer, sealed, in the order of computation; at least one.
        buffers: Most layers in memory at once, at least 2.

    Raises:
        ValueError: There are no layers, or too few buffers.
    """

    def __init__(self, file: WeightFile, regions: Sequence[Region], buffers: int = 3) -> None:
        if not regions or buffers < 2:
            raise ValueError(f"{len(regions)} layers in {buffers} buffers")
        self._file = file
        self._regions = list(regions)
        length = max(region.length for region in regions)
        self.buffers = min(buffers, len(regions))  # how many there are
        self._memory = [_huge_pages(length) for _ in range(self.buffers)]
        self.memory = self.buffers * length  # bytes of all buffers
        self._tensors = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]
        self._threads = futures.ThreadPoolExecutor(THREADS, "sequoia-weights", _use_every_core)
        self._ends = False
        # Layers are numbered through all passes: number n is layer n % layers.
        self._computed = 0  # all below are
        self._begun = 0  # all below are read, or will be
        self._reads: dict[int, list[futures.Future[None]]] = {}  # of those between, chunk by chunk
        self._unchecked = {
            (layer, chunk) for layer, region in enumerate(regions) for chunk in range(region.chunks)
        }
        self._counts = threading.Lock()
        self.bytes_read = 0

    def bytes_of(self, layer: int) -> torch.Tensor:
        """``[region.length]`` uint8: where a layer's weights are while it is computed."""
        return self._tensors[layer % self.buffers][: self._regions[layer].length]

    def start(self) -> None:
        """Begins to read into all buffers that are free."""
        while not self._ends and self._is_free(self._begun):
            layer = self._begun % len(self._regions)
            self._reads[self._begun] = [
                self._threads.submit(self._read, layer, chunk)
                for chunk in range(self._regions[layer].chunks)
            ]
            self._begun += 1

    def wait(self, layer: int) -> None:
        """Returns when a layer's weights are in memory.

        Layers are asked for in order. Where a pass was broken off, reading begins anew.

        Raises:
            OffloadError: They could not be read, or the ring is closed.
        """
        if self._computed % len(self._regions) != layer and not self._ends:
            self._begin_anew(layer)
        try:
            for read in self._reads.get(self._computed, ()):
                read.result()
        except futures.CancelledError:
            pass  # by `close`
        except Exception as error:
            raise OffloadError(str(error)) from error
        if self._ends:
            raise OffloadError("offloaded weights were asked for after the engine had ended")

    def release(self, layer: int) -> None:
        """A layer was computed: its buffer may be read into."""
        if self._computed % len(self._regions) == layer:
            self._reads.pop(self._computed, None)
            self._computed += 1
            self.start()

    def close(self) -> None:
        """Ends all threads; buffers must not be used any more."""
        self._ends = True
        self._threads.shutdown(cancel_futures=True)

    def _is_free(self, number: int) -> bool:
        """Whether the layer that was in this one's buffer has been computed."""
        layers, layer = len(self._regions), number % len(self._regions)
        buffers = len(self._memory)
        before = layer - buffers
        if before < 0:  # the last of the pass before that shares the buffer
            before = layer + (layers - 1 - layer) // buffers * buffers - layers
        return number + before - layer < self._computed

    def _begin_anew(self, layer: int) -> None:
        """Reads from this layer on, after it has waited for the reads under way."""
        begun = list(chain.from_iterable(self._reads.values()))
        for read in begun:
            read.cancel()
        futures.wait(begun)
        self._reads.clear()
        self._computed += (layer - self._computed) % len(self._regions)
        self._begun = self._computed
        self.start()

    def _read(self, layer: int, chunk: int) -> None:
        region, buffer = self._regions[layer], memoryview(self._memory[layer % self.buffers])
        self._file.read(region, chunk, buffer)
        # Each is checked once: a pass over the weights costs the core more than reading them.
        if (layer, chunk) in self._unchecked:
            self._file.check(region, chunk, buffer)
        with self._counts:
            self._unchecked.discard((layer, chunk))
            self.bytes_read += region.chunk(chunk)[1]


def _use_every_core() -> None:
    with suppress(OSError):  # vLLM binds threads that compute, and this one inherits it
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _huge_pages(length: int) -> mmap.mmap:
    # Shared memory, Python's default, seldom gets them.
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def keep_freed_memory() -> bool:
    """Has glibc keep memory that is freed from now on; False with another allocator or C library.
    It maps blocks of more than 32 MiB anew each time, such as activations of wide layers. The
    kernel clears their pages at each first touch."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    return all(bool(set_option(option, value)) for option, value in options)
