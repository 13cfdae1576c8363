"""Which bytes an interpreted kernel may touch: views of tensors, and live storages by address."""

import gc
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.support.quicker import unfreeze


@dataclass(frozen=True)
class Storage:
    """A tensor's memory: address of its first byte, and how many there are."""

    first: int
    size: int

    @staticmethod
    def of(tensor: Tensor) -> "Storage":
        storage = tensor.untyped_storage()
        return Storage(storage.data_ptr(), storage.nbytes())


@dataclass(frozen=True)
class Region:
    """What one pointer may be used for.

    Attributes:
        name: The kernel's argument, or how else it got the pointer.
        storage: Where it points to; None where no live tensor is.
        first: Address of the first byte.
        extent: Bytes from the first to the last one, gaps included.
        strides: Pairs of bytes and size of the dimensions that leave gaps, widest first.
        run: Bytes that follow one another without gaps; all of ``extent`` without strides.
    """

    name: str
    storage: Storage | None
    first: int
    extent: int
    strides: tuple[tuple[int, int], ...]
    run: int

    @staticmethod
    def of_view(name: str, tensor: Tensor) -> "Region":
        """Exactly the elements of a tensor, not what lies between its rows."""
        size = tensor.element_size()
        if tensor.numel() == 0:
            return Region(name, Storage.of(tensor), tensor.data_ptr(), 0, (), 0)
        dimensions = sorted(
            (
                (abs(stride) * size, length)
                for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
                if stride != 0 and length > 1
            )
        )
        extent = size + sum(stride * (length - 1) for stride, length in dimensions)
        run, strides = size, []
        inner = size  # extent of the dimensions so far
        for stride, length in dimensions:
            if stride < inner:  # rows overlap, as windows do: no gaps to speak of
                return Region(name, Storage.of(tensor), tensor.data_ptr(), extent, (), extent)
            if stride == run and not strides:
                run *= length
            else:
                strides.insert(0, (stride, length))
            inner += stride * (length - 1)
        return Region(name, Storage.of(tensor), tensor.data_ptr(), extent, tuple(strides), run)

    @staticmethod
    def of_storage(name: str, storage: Storage) -> "Region":
        """All of a storage."""
        return Region(name, storage, storage.first, storage.size, (), storage.size)

    @staticmethod
    def nowhere(name: str) -> "Region":
        """No byte at all."""
        return Region(name, None, 0, 0, (), 0)

    def outside(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Which accesses of ``width`` bytes at int64 addresses leave the region."""
        if self.storage is None:
            return np.ones(addresses.shape, dtype=bool)
        if not self.strides:
            return (addresses < self.first) | (addresses > self.first + self.run - width)
        offsets = addresses - self.first
        outside = offsets < 0
        for stride, length in self.strides:
            index = offsets // stride
            outside |= index >= length
            offsets = offsets - index * stride
        return outside | (offsets + width > self.run)

    def holds(self, address: int, width: int) -> bool:
        """Whether one access lies in the region; as `outside`, for one number quickly."""
        offset = address - self.first
        if self.storage is None or offset < 0:
            return False
        for stride, length in self.strides:
            index, offset = divmod(offset, stride)
            if index >= length:
                return False
        return offset + width <= self.run


class LiveStorages:
    """Finds the storage of a live tensor by an address in it.

    Tensors are found among the objects that Python's collector tracks; what was
    found is remembered for as long as that tensor lives.
    """

    def __init__(self) -> None:
        self._found: list[tuple[Storage, weakref.ref[Tensor]]] = []

    def find(self, address: int) -> Storage | None:
        """The storage that holds the byte at ``address``; None if no live tensor's does."""
        return self._remembered(address) or self._searched(address)

    def _remembered(self, address: int) -> Storage | None:
        for storage, reference in self._found:
            if storage.first <= address < storage.first + storage.size:
                tensor = reference()
                if tensor is not None and Storage.of(tensor) == storage:
                    return storage
        return None

    def _searched(self, address: int) -> Storage | None:
        self._found = [(storage, seen) for storage, seen in self._found if seen() is not None]
        found = self._listed(address)
        if found is None and gc.get_freeze_count():  # what is frozen is not listed
            unfreeze()
            found = self._listed(address)
        return found

    def _listed(self, address: int) -> Storage | None:
        for candidate in gc.get_objects():
            # Not isinstance: it asks proxies, whose objects may be gone.
            if not issubclass(type(candidate), Tensor) or not _has_memory(candidate):
                continue
            storage = Storage.of(candidate)
            if storage.first <= address < storage.first + storage.size:
                self._found.append((storage, weakref.ref(candidate)))
                return storage
        return None


def _has_memory(tensor: Tensor) -> bool:
    """False for what has none in this process: fake, meta, sparse and wrapping tensors."""
    try:
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError, ReferenceError):
        return False


def tensors_in(value: object, name: str) -> list[tuple[str, Tensor]]:
    """The tensors of a kernel's argument, with names: itself, of a tuple, of a descriptor."""
    if isinstance(value, tuple):
        items = ((item, f"{name}[{place}]") for place, item in enumerate(value))
        return [found for item, item_name in items for found in tensors_in(item, item_name)]
    if hasattr(value, "base"):  # a tensor descriptor, or a tensor under another dtype
        return tensors_in(value.base, name)
    return [(name, value)] if isinstance(value, torch.Tensor) else []
