"""Drafts without a model on the V1 runner."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig


class TextDrafterV1(ABC):
    """A draft without a model on the V1 runner: it runs no passes, and reads the target's logits.

    What it predicts may depend on these, but not on other nodes: see `TextDrafter`.
    """

    @abstractmethod
    def prepare(self, vllm_config: VllmConfig) -> None:
        """Allocates what it needs."""

    @abstractmethod
    def learn(self, tokens: Tensor, logits: Tensor, adapters: NDArray[np.int64]) -> None:
        """Takes the target's logits ``[R, V]`` after tokens int32 ``[R]`` of one step.

        ``adapters [R]``: id of the LoRA adapter of each row's request; 0: none.
        """

    @abstractmethod
    def logits(self, tokens: Tensor, adapters: NDArray[np.int64]) -> Tensor:
        """Logits ``[R, V]`` after tokens int64 ``[R]``; ``adapters`` as in `learn`."""
