"""Lookup on Model Runner V2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.drafters.lookup.table import Successors
from sequoia_vllm.drafting.growth import TreeGrowth
from sequoia_vllm.drafting.tree_tables import DraftLevels, picked
from sequoia_vllm.engine.v2.drafting.text_drafter import TextDrafter


class LookupGrowth(TreeGrowth):
    """Grows trees from the table."""

    _model: LookupDrafter

    def grow(self, num_reqs: int, levels: DraftLevels, max_keys: int) -> None:
        """See `TreeGrowth.grow`."""
        self.look_back(num_reqs)
        batch, texts = self._batch, self._token_ids
        slots, roots = batch.slots[:num_reqs], batch.roots[:num_reqs]
        rows = slots.clamp(min=0)
        tokens = texts[rows, roots.clamp(max=texts.shape[1] - 1).long()].long()[:, None]
        for level in levels.levels:
            if level.depth > 0:
                tokens = picked(self._drafted.tokens[:num_reqs], level.nodes, slots)
            logits = self._model.successors.logits(tokens.flatten())
            self._drafted.draw(batch, num_reqs, levels, level, logits)


class LookupDrafter(TextDrafter):
    """Keeps the table on the device."""

    successors: Successors

    def allocate(self, target_model: torch.nn.Module) -> None:
        """See `TreeDrafter.allocate`; the trees' Q is kept in the same dtype."""
        dtype = self.chains.draft_model_config.head_dtype
        self.successors = Successors(self.vocab_size, dtype, self.chains.device)

    def new_growth(self, **shared: Any) -> TreeGrowth:
        """See `TreeDrafter.new_growth`."""
        return LookupGrowth(**shared, model=self)

    def learn(self, tokens: Tensor, logits: Tensor) -> None:
        """See `TextDrafter.learn`."""
        self.successors.learn(tokens, logits)
