"""Settings that the front end decides and the workers read: a tag on vLLM's speculative config.

They are not in vLLM's ``additional_config``, by which vLLM keys its compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from sequoia_vllm.drafters.registry import DrafterKind
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.methods import DEFAULT_METHOD

DECLINED = "sequoia_declined"
_TAG = "_sequoia"  # set on the SpeculativeConfig of a Sequoia engine, to its `SequoiaSettings`
TO_BE_TAGGED: ContextVar[bool] = ContextVar("to_be_tagged", default=False)
"""Whether the speculative configuration that is being made gets a tag."""


@dataclass(frozen=True)
class SequoiaSettings:
    """The resolved settings of one engine."""

    tree: TokenTree  # the tree that every request drafts a prefix of
    tree_source: str  # where it came from, for the log
    chosen_for: str | None  # the device that it was chosen for; None: it does not depend on one
    versions: dict[str, str]  # plugin's and vLLM's versions where the engine was configured
    context_rule: tuple[int, int] | None = None  # a `ContextRule`, as plain data
    retrieval: bool = True
    recycling: bool = True  # see `SequoiaConfig` for this, `retrieval` and `verification`
    history: bool = False  # see `SequoiaConfig`
    dynamic_tree: bool = False  # whether greedy requests have dynamic trees
    verification: str = DEFAULT_METHOD
    adapts_as: str | None = None
    """Name of the file that keeps what the engine learns of how much to draft; None: it drafts as
    configured."""
    expected_speedup: float | None = None  # against plain decoding at batch size 1; None: not known
    drafter: DrafterKind = "model"  # what trees are grown with
    maps_vocabulary: bool = False  # whether the draft has other tokens than the target
    draft_tokens: list[int] | None = None
    """The target's tokens that the draft computes logits of; None: all."""
    keeps: bool = True  # whether it can write in the user's directory for its next start

    def is_static_step(self, number: int) -> bool:
        """Whether all trees of a step are static; steps that grow trees are counted from 1.

        An engine that adapts learns acceptance by child from static trees alone. The next start
        chooses its tree by that. It costs 1/16 of what dynamic ones gain.
        """
        return not self.dynamic_tree or (self.adapts_as is not None and number % 16 == 0)

    @staticmethod
    def enabled(vllm_config: Any) -> bool:
        """Whether this engine runs Sequoia."""
        return is_tagged(vllm_config.speculative_config)

    @staticmethod
    def declined(vllm_config: Any) -> bool:
        """Whether "auto" found that plain decoding is faster on this engine."""
        additional = vllm_config.additional_config
        return isinstance(additional, dict) and DECLINED in additional

    @classmethod
    def of(cls, vllm_config: Any) -> SequoiaSettings:
        """The settings of a Sequoia engine."""
        return cls.on(vllm_config.speculative_config)

    @staticmethod
    def on(speculative_config: Any) -> SequoiaSettings:
        """The settings that `store` has put on a speculative configuration."""
        found: SequoiaSettings = getattr(speculative_config, _TAG)
        return found

    def store(self, speculative_config: Any) -> None:
        """Tags vLLM's speculative configuration with these settings."""
        setattr(speculative_config, _TAG, self)

    def __reduce__(self) -> tuple[Callable[..., SequoiaSettings], tuple[Any, ...]]:
        """Pickles plain data, so that engines of other versions of the plugin can be told."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        return _received, ({**data, "tree": self.tree.parents},)


def is_tagged(speculative_config: Any) -> bool:
    """Whether this speculative configuration of vLLM's is Sequoia's."""
    return hasattr(speculative_config, _TAG)


def is_or_will_be_tagged(speculative_config: Any) -> bool:
    """`is_tagged`, also while the configuration is still being made."""
    return is_tagged(speculative_config) or TO_BE_TAGGED.get()


def _received(data: dict[str, Any]) -> SequoiaSettings:
    """Unpickles settings, and patches vLLM: Ray Serve's other processes load no plugins."""
    _load_plugin()
    known = {field.name for field in fields(SequoiaSettings)} & data.keys()
    values = {name: data[name] for name in known}
    return SequoiaSettings(**values | {"tree": TokenTree(data["tree"])})


@cache
def _load_plugin() -> None:
    """Calls the plugin's entry point once. vLLM leaves us out where ``VLLM_PLUGINS`` does."""
    for found in entry_points(group="vllm.general_plugins", name="sequoia"):
        found.load()()


def without_speculation(vllm_config: Any) -> Any:
    """A copy of an engine's configuration, as if it drafted nothing."""
    plain = copy(vllm_config)
    object.__setattr__(plain, "speculative_config", None)
    return plain
