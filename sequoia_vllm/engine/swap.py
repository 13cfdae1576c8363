"""A module-level name replaced for the length of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def swapped(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Within the block, ``module.name`` is ``value``."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
