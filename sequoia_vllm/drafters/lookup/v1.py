"""Lookup on the V1 runner."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig

from sequoia_vllm.drafters.lookup.table import Successors
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.v1.proposer import TextDrafterV1


class LookupDrafterV1(TextDrafterV1):
    """Keeps the table."""

    def prepare(self, vllm_config: VllmConfig) -> None:
        """See `TextDrafterV1.prepare`."""
        vocab_size = vllm_config.model_config.get_vocab_size()
        lora, self._learns = vllm_config.lora_config, SequoiaSettings.of(vllm_config).recycling
        self._successors = Successors(
            vocab_size, torch.float32, torch.device("cpu"), lora.max_loras if lora else 0
        )

    def learn(self, tokens: Tensor, logits: Tensor, adapters: NDArray[np.int64]) -> None:
        """See `TextDrafterV1.learn`."""
        if self._learns:
            self._successors.learn(tokens, logits, self._first_rows(adapters))

    def logits(self, tokens: Tensor, adapters: NDArray[np.int64]) -> Tensor:
        """See `TextDrafterV1.logits`."""
        return self._successors.logits(tokens, self._first_rows(adapters))

    def _first_rows(self, adapters: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._successors.first_rows(adapters))
