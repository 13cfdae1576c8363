"""Attributes and context variables replaced, most for the length of one call."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


@contextmanager
def patched(owner: object, name: str, value: Any) -> Iterator[None]:
    """Within the block, ``owner.name`` is ``value``; a class's static methods stay so."""
    own = vars(owner) if isinstance(owner, type) else {}
    original = own[name] if name in own else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def patch_for_good(owner: object, name: str, value: Any) -> None:
    """From now on ``owner.name`` is ``value``. Engines without trees must not call this."""
    setattr(owner, name, value)


@contextmanager
def known(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Within the block, and in what it calls, ``variable`` is ``value``."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
