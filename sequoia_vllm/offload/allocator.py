"""Memory that is freed and wanted again in every layer, kept by the process."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_NEVER = -1


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed from now on, instead of giving it back to the kernel.

    It maps blocks of more than 32 MiB anew at each allocation, whatever was freed, and the
    kernel clears their pages at each first touch: wide layers have such activations.

    Returns:
        Whether it does; not where another allocator is loaded, or another C library.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    return all(bool(set_option(option, value)) for option, value in options)
