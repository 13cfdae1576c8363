"""Says that a speculative configuration is Sequoia's, also in processes that receive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ATTRIBUTE = "_sequoia"  # set on the SpeculativeConfig of a Sequoia engine, to a `_Mark`
_to_be_marked: ContextVar[bool] = ContextVar("_to_be_marked", default=False)


@contextmanager
def to_be_marked() -> Iterator[None]:
    """The speculative configuration that is made within the block is to be marked."""
    token = _to_be_marked.set(True)
    try:
        yield
    finally:
        _to_be_marked.reset(token)


def is_or_will_be_marked(speculative_config: Any) -> bool:
    """`is_marked`, also while the configuration is still being made."""
    return is_marked(speculative_config) or _to_be_marked.get()


def mark(speculative_config: Any, depth: int) -> None:
    """Marks vLLM's speculative configuration as Sequoia's, with a tree so deep."""
    setattr(speculative_config, _ATTRIBUTE, _Mark(depth))


def is_marked(speculative_config: Any) -> bool:
    """Whether this speculative configuration of vLLM's is Sequoia's."""
    return hasattr(speculative_config, _ATTRIBUTE)


def marked_depth(speculative_config: Any) -> int:
    """Depth of the tree of a marked configuration, in edges."""
    found: _Mark = getattr(speculative_config, _ATTRIBUTE)
    return found.depth


class _Mark:
    """Patches vLLM in each process that unpickles the configuration.

    Ray Serve configures engines in another process than the one that talks to
    them, where no plugins are loaded: without the patches that one would refuse
    requests that Sequoia serves, and would count no trees.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __reduce__(self) -> tuple[Callable[[int], _Mark], tuple[int]]:
        return _received_mark, (self.depth,)


def _received_mark(depth: int) -> _Mark:
    from sequoia_vllm.engine.hooks import install  # which needs this module

    install()
    return _Mark(depth)
