"""Draft models on Model Runner V2."""

from dataclasses import replace

import torch
from torch import Tensor

from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.runner.vocabulary import draft_vocabulary
from sequoia_vllm.engine.v2.drafting.drafter import DraftPass, TreeDrafter


class ModelDrafter(TreeDrafter):
    """Reads and drafts the target's tokens, also where the model has another vocabulary."""

    def allocate(self, target_model: torch.nn.Module) -> None:
        """Matches the vocabularies."""
        self._vocabulary = draft_vocabulary(self.chains.vllm_config, self.model, self.chains.device)

    def run(self, rows: DraftPass) -> DraftStates:
        """See `TreeDrafter.run`."""
        own_ids = self._vocabulary.read(rows.token_ids)
        hidden = self.run_model(replace(rows, token_ids=own_ids))
        return DraftStates(hidden[0] if isinstance(hidden, tuple) else hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftModel.compute_logits`."""
        return self._vocabulary.target_logits(self.model.compute_logits(hidden))
