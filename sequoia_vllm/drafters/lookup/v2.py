"""Lookup on Model Runner V2."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from sequoia_vllm.drafters.lookup.table import Successors
from sequoia_vllm.drafting.growth import TreeGrowth
from sequoia_vllm.drafting.tree_tables import DraftLevels, picked
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.v2.drafting.drafter import TextDrafter


class LookupGrowth(TreeGrowth):
    """Grows trees from the table."""

    _model: "LookupDrafter"

    def grow(self, num_reqs: int, levels: DraftLevels, max_keys: int) -> None:
        """See `TreeGrowth.grow`."""
        self.look_back(num_reqs)
        batch, texts = self._batch, self._inputs.all_token_ids
        slots, roots = batch.slots[:num_reqs], batch.roots[:num_reqs]
        rows = slots.clamp(min=0)
        tokens = texts[rows, roots.clamp(max=texts.shape[1] - 1).long()].long()[:, None]
        of_slots = self._model.first_rows
        first_rows = None if of_slots is None else of_slots[rows, None]
        for level in levels.levels:
            if level.depth > 0:
                tokens = picked(self._drafted.tokens[:num_reqs], level.nodes, slots)
            starts = None if first_rows is None else first_rows.expand_as(tokens).flatten()
            logits = self._model.successors.logits(tokens.flatten(), starts)
            self._drafted.draw(batch, num_reqs, levels, level, logits)


class LookupDrafter(TextDrafter):
    """Keeps the table on the device."""

    successors: Successors
    first_rows: Tensor | None = None
    """int64 ``[request slots]``: see `Successors.first_rows`; None: no adapters."""

    def allocate(self, target_model: torch.nn.Module) -> None:
        """See `TreeDrafter.allocate`; the trees' Q is kept in the same dtype."""
        dtype = self.chains.draft_model_config.head_dtype
        lora, device = self.chains.vllm_config.lora_config, self.chains.device
        adapters = lora.max_loras if lora else 0
        self.successors = Successors(self.vocab_size, dtype, device, adapters)
        if lora:
            self._noted = np.zeros(self.chains.max_num_reqs, dtype=np.int64)
            self.first_rows = torch.from_numpy(self._noted).to(device, copy=True)

    def note_adapters(self, slots: NDArray[np.int32], adapters: NDArray[np.int32]) -> None:
        """See `TreeDrafter.note_adapters`; graphs read what is noted."""
        if self.first_rows is None:
            return
        first_rows = self.successors.first_rows(adapters)
        if (self._noted[slots] != first_rows).any():
            self._noted[slots] = first_rows
            async_tensor_h2d(self._noted, out=self.first_rows)

    def new_growth(self, **shared: Any) -> TreeGrowth:
        """See `TreeDrafter.new_growth`."""
        return LookupGrowth(**shared, model=self)

    def learn(self, tokens: Tensor, logits: Tensor, slots: Tensor) -> None:
        """See `TextDrafter.learn`."""
        if SequoiaSettings.of(self.chains.vllm_config).recycling:
            first_rows = None if self.first_rows is None else self.first_rows[slots.long()]
            self.successors.learn(tokens, logits, first_rows)
