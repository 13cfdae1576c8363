"""A draft's configuration, as vLLM will read it."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

from sequoia_vllm.config import SequoiaConfig


def read_draft_config(target: Any, draft: str, config: SequoiaConfig) -> Any:
    """As vLLM's ``SpeculativeConfig`` will: much as the target's.

    vLLM makes its configuration of the draft only later, when it must know the number of drafts.

    Args:
        target: vLLM's configuration of the target.
        draft: Name or path of the draft.
        config: What the user gave; its keys for the draft count.

    Raises:
        OSError, ValueError, RuntimeError: It cannot be read. vLLM reads it again, and then
            says what the user should do.
    """
    overrides = target.hf_overrides
    keys = config.draft_keys()
    found = get_config(
        draft,
        target.trust_remote_code,
        keys.get("revision"),
        keys.get("code_revision"),
        target.config_format,
        None,
        overrides if callable(overrides) else None,
    )
    if isinstance(found, SpeculatorsConfig):
        # vLLM keeps what it needs, which of a DFlash head's is not how far it drafts.
        stated, _ = SpeculatorsConfig.get_config_dict(draft, revision=keys.get("revision"))
        found.block_size = stated.get("block_size")
    return found
