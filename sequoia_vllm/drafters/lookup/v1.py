"""Lookup on the V1 runner."""

import torch
from torch import Tensor
from vllm.config import VllmConfig

from sequoia_vllm.drafters.lookup.table import Successors
from sequoia_vllm.engine.v1.text_drafter import TextDrafterV1


class LookupDrafterV1(TextDrafterV1):
    """Keeps the table."""

    def prepare(self, vllm_config: VllmConfig) -> None:
        """See `TextDrafterV1.prepare`."""
        vocab_size = vllm_config.model_config.get_vocab_size()
        self._successors = Successors(vocab_size, torch.float32, torch.device("cpu"))

    def learn(self, tokens: Tensor, logits: Tensor) -> None:
        """See `TextDrafterV1.learn`."""
        self._successors.learn(tokens, logits)

    def logits(self, tokens: Tensor) -> Tensor:
        """See `TextDrafterV1.logits`."""
        return self._successors.logits(tokens)
