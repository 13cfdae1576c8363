"""One file without a name that holds weights while an engine runs.

Nothing of it is left however the process ends, and no other process can change it. Whatever loads a
checkpoint writes it, through mapped memory. It is read with direct I/O, past the page cache: where
weights do not fit in memory, a cache of them would only displace what does.
"""

import errno
import mmap
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from psutil import disk_partitions  # vLLM depends on it

from sequoia_vllm.errors import SequoiaError

CHUNK = 8 << 20
"""Bytes of one read, and of one checksum: many are under way at once."""

_PAGE = mmap.ALLOCATIONGRANULARITY  # what direct I/O needs on the disks that we know, or more
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class OffloadError(SequoiaError, RuntimeError):
    """Weights that cannot be kept on, or read from, a disk; the message names the fix."""


@dataclass(frozen=True)
class Region:
    """A part of the file: of one layer."""

    offset: int  # offset of its first byte, a multiple of a page
    length: int  # in bytes, a multiple of a page

    @property
    def chunks(self) -> int:
        """Number of reads that it takes."""
        return -(-self.length // CHUNK)

    def chunk(self, number: int) -> tuple[int, int]:
        """(offset within the region, bytes) of one of them."""
        at = number * CHUNK
        return at, min(CHUNK, self.length - at)


class WeightFile:
    """Regions that are written once, sealed, and read many times.

    Args:
        directory: Where the file lies: on a disk whose filesystem knows direct I/O.

    Raises:
        OffloadError: It lies on no such disk, or cannot be written to. Methods raise it where the
            disk is full, fails, or gives something else than what was written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._end = 0
        self._checksums: dict[int, list[int]] = {}
        kind = filesystem_of(directory)
        if kind in _IN_MEMORY:
            raise OffloadError(
                f"offload directory {directory} is in memory ({kind}): name one on a disk"
            )
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (until `close`)
        except OSError as error:
            raise OffloadError(
                f"offload directory {directory}: {error.strerror}; name one that can be written to"
            ) from None
        try:
            self._direct = os.open(
                f"/proc/self/fd/{self._file.fileno()}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
            )
        except OSError as error:
            self._file.close()
            raise OffloadError(
                f"offload directory {directory}: its filesystem ({kind}) has no direct I/O "
                f"({error.strerror}); name one on ext4, xfs or btrfs"
            ) from None

    def region(self, length: int) -> tuple[Region, torch.Tensor]:
        """A new region of at least ``length`` bytes, with its space taken on the disk.

        Returns:
            The region, of whole pages, and its bytes: ``[region.length]`` uint8, zeros, mapped to
            the file. What is written there is kept when the region is sealed.
        """
        region = Region(self._end, -(-length // _PAGE) * _PAGE)
        try:
            os.posix_fallocate(self._file.fileno(), region.offset, region.length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = os.statvfs(self.directory)
            raise OffloadError(
                f"offload directory {self.directory} has no room for another "
                f"{region.length / 2**20:.0f} MiB, after {self._end / 2**30:.1f} GiB "
                f"({free.f_bavail * free.f_frsize / 2**30:.1f} GiB are free, {error.strerror}): "
                "name one on a larger disk, or keep more in memory (memory_gib)"
            ) from None
        self._end += region.length
        mapped = mmap.mmap(self._file.fileno(), region.length, offset=region.offset)
        return region, torch.frombuffer(mapped, dtype=torch.uint8)

    def seal(self, region: Region, written: torch.Tensor) -> None:
        """Takes the checksums of what was written, and sends it to the disk."""
        view = memoryview(written.numpy())
        self._checksums[region.offset] = [
            zlib.crc32(view[at : at + size]) for at, size in map(region.chunk, range(region.chunks))
        ]
        try:
            os.fsync(self._file.fileno())
            # Direct reads need no cached copy, and its memory is wanted.
            os.posix_fadvise(
                self._file.fileno(), region.offset, region.length, os.POSIX_FADV_DONTNEED
            )
        except OSError as error:
            raise OffloadError(
                f"offload directory {self.directory}: {error.strerror} while weights were written"
            ) from None

    def read(self, region: Region, chunk: int, buffer: memoryview) -> None:
        """Reads one of ``region.chunks`` from the disk; any thread may call.
        All of the region's bytes begin at ``buffer``, at a page."""
        at, size = region.chunk(chunk)
        try:
            count = os.preadv(self._direct, [buffer[at : at + size]], region.offset + at)
        except OSError as error:
            raise OffloadError(f"{self._of(region, at)}: {error.strerror}") from None
        if count != size:
            raise OffloadError(
                f"{self._of(region, at)}: the disk gave {count} of {size} bytes; check it, and "
                "start the engine anew"
            )

    def check(self, region: Region, chunk: int, buffer: memoryview) -> None:
        """Compares a chunk that was read with what was written; arguments as of `read`."""
        at, size = region.chunk(chunk)
        if zlib.crc32(buffer[at : at + size]) != self._checksums[region.offset][chunk]:
            raise OffloadError(
                f"{self._of(region, at)}: what the disk gave is not what was written (checksums "
                "differ); check the disk, and start the engine anew"
            )

    def _of(self, region: Region, at: int) -> str:
        return f"offloaded weights in {self.directory}, at byte {region.offset + at}"

    def close(self) -> None:
        """Gives the space back."""
        os.close(self._direct)
        self._file.close()


def filesystem_of(directory: Path) -> str:
    """The type of the filesystem that a directory, which must be there, lies on, like "ext4"."""
    if not directory.is_dir():
        raise OffloadError(f"offload directory {directory} is no directory: make it, or name one")
    place = directory.resolve()
    mounts = [one for one in disk_partitions(all=True) if place.is_relative_to(one.mountpoint)]
    # Where mounts lie over each other, the last one counts.
    found = max(reversed(mounts), key=lambda one: len(Path(one.mountpoint).parts), default=None)
    return "unknown" if found is None else str(found.fstype)
