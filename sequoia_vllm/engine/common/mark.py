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


def mark(speculative_config: Any, depth: int, settings: dict[str, Any]) -> None:
    """Marks vLLM's speculative configuration as Sequoia's, with a tree so deep.

    Args:
        settings: What `SequoiaSettings` reads; plain data, so that engines of other versions
            of the plugin can be told from ours.
    """
    setattr(speculative_config, _ATTRIBUTE, _Mark(depth, settings))


def is_marked(speculative_config: Any) -> bool:
    """Whether this speculative configuration of vLLM's is Sequoia's."""
    return hasattr(speculative_config, _ATTRIBUTE)


def marked_depth(speculative_config: Any) -> int:
    """Depth of the tree of a marked configuration, in edges."""
    found: _Mark = getattr(speculative_config, _ATTRIBUTE)
    return found.depth


def marked_settings(speculative_config: Any) -> dict[str, Any]:
    """What `mark` was given with a marked configuration."""
    found: _Mark = getattr(speculative_config, _ATTRIBUTE)
    return found.settings


class _Mark:
    """Patches vLLM in each process that unpickles the configuration.

    Ray Serve configures engines in another process than the one that talks to
    them, where no plugins are loaded: without the patches that one would refuse
    requests that Sequoia serves, and would count no trees.
    """

    def __init__(self, depth: int, settings: dict[str, Any]) -> None:
        self.depth = depth
        self.settings = settings

    def __reduce__(self) -> tuple[Callable[..., _Mark], tuple[Any, ...]]:
        return _received_mark, (self.depth, self.settings)


def _received_mark(depth: int, settings: dict[str, Any]) -> _Mark:
    from sequoia_vllm.engine.hooks import install  # which needs this module

    install()
    return _Mark(depth, settings)
