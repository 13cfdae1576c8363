"""Drafts without a model on Model Runner V2."""

from abc import abstractmethod

import torch
from torch import Tensor

from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.v2.drafting.drafter import DraftPass, TreeDrafter


class TextDrafter(TreeDrafter):
    """A draft without a model: it runs no passes, and reads the target's logits.

    Its `new_growth` grows trees without passes. What it predicts may depend on the target's logits
    and on committed text, but not on other nodes of the tree. Else a tree would not have the law
    that it is verified against.
    """

    def load(self, target_model: torch.nn.Module, target_layers: set[str]) -> torch.nn.Module:
        """Loads nothing; see `TreeDrafter.load`."""
        return torch.nn.Module()

    def run(self, rows: DraftPass) -> DraftStates:
        """Is not called: there are no passes."""
        raise NotImplementedError

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Is not called, either."""
        raise NotImplementedError

    @abstractmethod
    def learn(self, tokens: Tensor, logits: Tensor, slots: Tensor) -> None:
        """Takes the target's logits ``[R, V]`` after tokens int32 ``[R]``, not to be changed.

        Args:
            slots: int32 ``[R]``: the slot of each row's request.
        """
