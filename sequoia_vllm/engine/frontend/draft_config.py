"""A draft's configuration, as vLLM will read it."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

from sequoia_vllm.config import SequoiaConfig


class DraftReader:
    """Reads the configurations of the drafts that one engine may take, each once.

    vLLM makes its configuration of the draft only later, when it must know the number of drafts.

    Attributes:
        target: vLLM's configuration of the target.
        config: What the user gave; its keys for the draft count.
    """

    def __init__(self, target: Any, config: SequoiaConfig) -> None:
        self.target = target
        self.config = config
        self._found: dict[str, Any] = {}

    def read(self, draft: str) -> Any:
        """As vLLM's ``SpeculativeConfig`` will: much as the target's. Not to be changed.

        Args:
            draft: Name or path of the draft.

        Raises:
            OSError, ValueError, RuntimeError: It cannot be read. vLLM reads it again, and then
                says what the user should do.
        """
        if draft not in self._found:
            self._found[draft] = self._read(draft)
        return self._found[draft]

    def _read(self, draft: str) -> Any:
        target, keys = self.target, self.config.draft_keys()
        overrides = target.hf_overrides
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
