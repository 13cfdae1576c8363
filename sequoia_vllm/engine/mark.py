"""Says that a speculative configuration is Sequoia's, also in processes that receive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ATTRIBUTE = "_sequoia"  # set on the SpeculativeConfig of a Sequoia engine, to a `_Mark`


def mark(speculative_config: Any) -> None:
    """Marks vLLM's speculative configuration as Sequoia's."""
    setattr(speculative_config, _ATTRIBUTE, _Mark())


def is_marked(speculative_config: Any) -> bool:
    """Whether this speculative configuration of vLLM's is Sequoia's."""
    return hasattr(speculative_config, _ATTRIBUTE)


class _Mark:
    """Patches vLLM in each process that unpickles the configuration.

    Ray Serve configures engines in another process than the one that talks to
    them, where no plugins are loaded: without the patches that one would refuse
    requests that Sequoia serves, and would count no trees.
    """

    def __reduce__(self) -> tuple[Callable[[], _Mark], tuple[()]]:
        return _received_mark, ()


def _received_mark() -> _Mark:
    from sequoia_vllm.engine.hooks import install  # which needs this module

    install()
    return _Mark()
