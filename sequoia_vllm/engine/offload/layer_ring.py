"""Buffers that layers' weights are read into, ahead of the layer that is computed.

Also an allocator setting for the activations of wide layers, which stand beside the buffers.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from sequoia_vllm.engine.offload.weight_file import OffloadError, Region, WeightFile

THREADS = 4
"""Reads under way at once: one at a time leaves a disk idle between them."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_NEVER = -1


class LayerRing:
    """Reads layers in the order in which they are computed, over and over.

    Layer i always lies in buffer ``i % buffers``, so that a weight's address never changes. Threads
    read as far ahead as buffers are free. Used by one computing thread.

    Args:
        regions: Each layer's, in the order of computation, sealed.
        buffers: How many layers are in memory at once, at least 2 (ValueError).
    """

    def __init__(self, file: WeightFile, regions: Sequence[Region], buffers: int = 3) -> None:
        if not regions or buffers < 2:
            raise ValueError(f"{len(regions)} layers in {buffers} buffers")
        self._file = file
        self._regions = list(regions)
        buffers = min(buffers, len(regions))
        length = max(region.length for region in regions)
        self._memory = [_huge_pages(length) for _ in range(buffers)]
        self._tensors = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]
        self._chunks = [region.chunks for region in regions]
        self._state = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._ends = False
        # Layers are numbered through all passes: number n is layer n % layers.
        self._computed = 0  # all below are
        self._reading = 0, 0  # (number, chunk) that is read next
        self._under_way = 0
        self._left: dict[int, int] = {}  # chunks that a number still lacks
        self._unchecked = {(layer, k) for layer, n in enumerate(self._chunks) for k in range(n)}
        self.bytes_read = 0

    def bytes_of(self, layer: int) -> torch.Tensor:
        """``[region.length]`` uint8: where a layer's weights are while it is computed."""
        return self._tensors[layer % self.buffers][: self._regions[layer].length]

    @property
    def memory(self) -> int:
        """Bytes of all buffers."""
        return sum(len(memory) for memory in self._memory)

    @property
    def buffers(self) -> int:
        """Number of buffers."""
        return len(self._memory)

    def start(self) -> None:
        """Begins to read."""
        for number in range(THREADS):
            thread = threading.Thread(
                target=self._read_on, name=f"sequoia-weights-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def wait(self, layer: int) -> None:
        """Returns when a layer's weights are in memory; OffloadError: they could not be read.

        Layers are asked for in order; where a pass was broken off, reading begins anew.
        """
        with self._state:
            if self._computed % len(self._regions) != layer:
                self._begin_anew(layer)
            number = self._computed
            self._state.wait_for(lambda: self._error or self._ends or self._left.get(number) == 0)
            if self._error is not None:
                raise OffloadError(str(self._error)) from self._error
            if self._ends:
                raise OffloadError("offloaded weights were asked for after the engine had ended")

    def release(self, layer: int) -> None:
        """A layer was computed: its buffer may be read into."""
        with self._state:
            if self._computed % len(self._regions) == layer:
                self._computed += 1
                self._state.notify_all()

    def close(self) -> None:
        """Ends all threads; buffers must not be used any more."""
        with self._state:
            self._ends = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join()

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
        layers = len(self._regions)
        self._reading = -1, 0  # nothing more is begun
        self._state.wait_for(lambda: self._under_way == 0)
        self._left.clear()
        self._computed += (layer - self._computed) % layers
        self._reading = self._computed, 0
        self._state.notify_all()

    def _read_on(self) -> None:
        with suppress(OSError):  # vLLM binds threads that compute, and this one inherits it
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            while (task := self._next()) is not None:
                self._read(*task)
        except BaseException as error:
            with self._state:
                self._error = self._error or error
                self._under_way -= 1
                self._state.notify_all()

    def _next(self) -> tuple[int, int] | None:
        """The next chunk, once its buffer is free; None: the end."""
        with self._state:
            self._state.wait_for(
                lambda: (
                    self._ends
                    or self._error
                    or (self._reading[0] >= 0 and self._is_free(self._reading[0]))
                )
            )
            if self._ends or self._error:
                return None
            number, chunk = self._reading
            layer = number % len(self._regions)
            if chunk == 0:
                self._left[number] = self._chunks[layer]
                self._left.pop(number - 2 * len(self._regions), None)
            is_last = chunk + 1 == self._chunks[layer]
            self._reading = (number + 1, 0) if is_last else (number, chunk + 1)
            self._under_way += 1
            return number, chunk

    def _read(self, number: int, chunk: int) -> None:
        layer = number % len(self._regions)
        region, buffer = self._regions[layer], memoryview(self._memory[layer % self.buffers])
        self._file.read(region, chunk, buffer)
        # Each is checked once: a pass over the weights costs the core more than reading them.
        if (layer, chunk) in self._unchecked:
            self._file.check(region, chunk, buffer)
        with self._state:
            self._unchecked.discard((layer, chunk))
            self._under_way -= 1
            self._left[number] -= 1
            self.bytes_read += region.chunk(chunk)[1]
            self._state.notify_all()


def _huge_pages(length: int) -> mmap.mmap:
    # Shared memory, Python's default, seldom gets them.
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def keep_freed_memory() -> bool:
    """Has glibc keep memory that is freed from now on, instead of giving it back to the kernel.

    It maps blocks of more than 32 MiB anew at each allocation, and the kernel clears their pages at
    each first touch. Wide layers have such activations. False with another allocator or C library.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    return all(bool(set_option(option, value)) for option, value in options)
