"""Settings that the front end decides and the workers read; the tag of `config_tag` carries them.

They are not in vLLM's ``additional_config``, as vLLM keys its compiled code by all of it. The tree
and its expected speed differ from start to start, and no compiled code depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sequoia_vllm.config import ContextAttention
from sequoia_vllm.drafters.registry import DrafterKind
from sequoia_vllm.engine.common.config_tag import is_tagged, tag, tagged_settings
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.methods import DEFAULT_METHOD

DECLINED = "sequoia_declined"


@dataclass(frozen=True)
class SequoiaSettings:
    """The resolved settings of one engine.

    Attributes:
        tree: The tree that every request drafts a prefix of.
        tree_source: Where it came from, for the log.
        chosen_for: The device that it was chosen for; None: it does not depend on one.
        versions: Plugin's and vLLM's versions where the engine was configured.
        context_attention, verification: See `SequoiaConfig`.
        adapts_as: Name of the file that keeps what the engine learns of how much to draft; None:
            it drafts as configured.
        expected_speedup: Against plain decoding at batch size 1; None: not known.
        drafter: What trees are grown with.
        maps_vocabulary: Whether the draft has other tokens than the target.
        draft_tokens: The target's tokens that the draft computes logits of; None: all.
        keeps: Whether it can write in the user's directory for its next start.
    """

    tree: TokenTree
    tree_source: str
    chosen_for: str | None
    versions: dict[str, str]
    context_attention: ContextAttention = "triton"
    verification: str = DEFAULT_METHOD
    adapts_as: str | None = None
    expected_speedup: float | None = None
    drafter: DrafterKind = "model"
    maps_vocabulary: bool = False
    draft_tokens: list[int] | None = None
    keeps: bool = True

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
        """Reads what `store` wrote."""
        data = tagged_settings(vllm_config.speculative_config)
        values = {field.name: data[field.name] for field in fields(cls)}
        values["tree"] = TokenTree.from_dict(data["tree"])
        return cls(**values)

    def store(self, speculative_config: Any) -> None:
        """Tags vLLM's speculative configuration with these settings, as plain data."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["tree"] = self.tree.to_dict()
        tag(speculative_config, self.tree.depth, data)
