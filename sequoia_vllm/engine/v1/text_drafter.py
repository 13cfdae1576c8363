"""Drafts without a model on the V1 runner."""

from abc import ABC, abstractmethod

from torch import Tensor
from vllm.config import VllmConfig


class TextDrafterV1(ABC):
    """A draft without a model on the V1 runner: it runs no passes, and reads the target's logits.

    What it predicts may depend on the target's logits, but not on other nodes of the tree. Else a
    tree would not have the law that it is verified against.
    """

    @abstractmethod
    def prepare(self, vllm_config: VllmConfig) -> None:
        """Allocates what it needs."""

    @abstractmethod
    def learn(self, tokens: Tensor, logits: Tensor) -> None:
        """Takes the target's logits ``[R, V]`` after tokens int32 ``[R]`` of one step."""

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits ``[R, V]`` after tokens int64 ``[R]``."""
