"""The tag on vLLM's speculative configuration that says it is Sequoia's, in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import entry_points
from typing import Any

_ATTRIBUTE = "_sequoia"  # set on the SpeculativeConfig of a Sequoia engine, to a `_Tag`
_to_be_tagged: ContextVar[bool] = ContextVar("_to_be_tagged", default=False)


@contextmanager
def to_be_tagged() -> Iterator[None]:
    """Announces that the speculative configuration made within the block gets a tag."""
    reset = _to_be_tagged.set(True)
    try:
        yield
    finally:
        _to_be_tagged.reset(reset)


def is_or_will_be_tagged(speculative_config: Any) -> bool:
    """`is_tagged`, also while the configuration is still being made."""
    return is_tagged(speculative_config) or _to_be_tagged.get()


def tag(speculative_config: Any, depth: int, settings: dict[str, Any]) -> None:
    """Tags vLLM's speculative configuration as Sequoia's.

    Args:
        speculative_config: vLLM's.
        depth: Depth of the tree, in edges.
        settings: What `SequoiaSettings` reads; plain data, so that engines of other versions
            of the plugin can be told from ours.
    """
    setattr(speculative_config, _ATTRIBUTE, _Tag(depth, settings))


def is_tagged(speculative_config: Any) -> bool:
    """Whether this speculative configuration of vLLM's is Sequoia's."""
    return hasattr(speculative_config, _ATTRIBUTE)


def tagged_depth(speculative_config: Any) -> int:
    """Depth of the tree of a tagged configuration, in edges."""
    found: _Tag = getattr(speculative_config, _ATTRIBUTE)
    return found.depth


def tagged_settings(speculative_config: Any) -> dict[str, Any]:
    """The settings that `tag` was given with a tagged configuration."""
    found: _Tag = getattr(speculative_config, _ATTRIBUTE)
    return found.settings


class _Tag:
    """Patches vLLM in each process that unpickles the configuration.

    Ray Serve configures engines in one process and talks to them in another, where no plugins are
    loaded. Without the patches that process would refuse requests that Sequoia serves, and would
    count no trees.
    """

    def __init__(self, depth: int, settings: dict[str, Any]) -> None:
        self.depth = depth
        self.settings = settings

    def __reduce__(self) -> tuple[Callable[..., _Tag], tuple[Any, ...]]:
        return _received_tag, (self.depth, self.settings)


def _received_tag(depth: int, settings: dict[str, Any]) -> _Tag:
    _load_plugin()
    return _Tag(depth, settings)


@cache
def _load_plugin() -> None:
    """Calls the plugin's entry point, once per process.

    vLLM's ``load_general_plugins`` does not suffice: it does not load us where ``VLLM_PLUGINS``
    leaves us out, and loads nothing a second time. An engine with this configuration needs the
    patches.
    """
    for found in entry_points(group="vllm.general_plugins", name="sequoia"):
        found.load()()
