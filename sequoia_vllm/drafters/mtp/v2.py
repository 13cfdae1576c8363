"""MTP layers on Model Runner V2."""

import torch
from torch import Tensor

from sequoia_vllm.drafters.eagle3.v2 import LevelHeadDrafter


class LayerDrafter(LevelHeadDrafter):
    """Reads the target's last states as they are: such a layer has their width."""

    def layers_read(self, target_model: torch.nn.Module) -> int:
        """See `HeadDrafter.layers_read`."""
        return 1

    def states_read(self, last: Tensor, auxiliary: list[Tensor] | None) -> list[Tensor]:
        """See `HeadDrafter.states_read`."""
        return [last]

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.combine_hidden_states`."""
        return target_states
