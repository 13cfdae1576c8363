"""Growth by a drafter that predicts all levels in one pass (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.drafting.growth import DraftModel, DraftStates, TreeGrowth, chain_width
from sequoia_vllm.drafting.tree_tables import DraftLevels


class BlockModel(DraftModel):
    """What growth needs of such a drafter; its forward gives nothing back to later passes."""

    @abstractmethod
    def store_context(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Keeps keys and values of committed tokens, made from states of the target.

        Args:
            states: ``[rows, F]``: `feedback_of` the target's states.
            positions: int64 ``[rows]``.
            slots: int64 ``[groups, rows]``: where they go; -1: nowhere.
        """


class BlockGrowth(TreeGrowth):
    """Grows trees from one forward over a block of each request: its root, and a mask per level.

    All nodes of a level have the same Q, whatever tokens lie above them: that at the level's
    mask. The children of each are drawn on their own, as verification takes Q at a node for
    independent of what was drawn at others.

    Args:
        mask_token: What stands at positions that are predicted.
        shared: As of `TreeGrowth`; its model is a `BlockModel`.
    """

    _model: BlockModel

    def __init__(self, *, mask_token: int, **shared: Any) -> None:
        super().__init__(**shared)
        self._mask_token = mask_token
        self._sees_all = torch.ones_like(self._chain)

    def read_committed(self, num_reqs: int, levels: DraftLevels, max_keys: int) -> DraftStates:
        """Keeps the context of up to `chain_width` committed tokens of each request.

        Returns:
            What it was made from.
        """
        batch, width, inputs = self._batch, chain_width(levels), self._inputs
        rows = num_reqs * width
        inputs.read_committed(
            requests=batch.slots[:num_reqs],
            starts=batch.starts[:num_reqs],
            counts=batch.counts[:num_reqs],
            all_token_ids=self._token_ids,
            width=width,
            longest=self._draft_max_len,
        )
        assert self._target_states is not None
        states = self._model.feedback_of(self._target_states[:rows])
        self._model.store_context(states, inputs.positions[:rows], inputs.slots[:, :rows])
        return DraftStates(states)

    def grow(self, num_reqs: int, levels: DraftLevels, roots: DraftStates, max_keys: int) -> None:
        """One forward over every request's block, then the children of each level's nodes."""
        batch, width = self._batch, chain_width(levels)
        self._inputs.read_block(
            requests=batch.slots[:num_reqs],
            roots=batch.roots[:num_reqs],
            all_token_ids=self._token_ids,
            width=width,
            mask_token=self._mask_token,
            max_len=self._max_model_len,
            longest=self._draft_max_len,
        )
        states = self._forward(batch.roots[:num_reqs], 0, width, self._sees_all, max_keys, None)
        # The root's own row predicts nothing.
        masks = states.hidden.view(num_reqs, width, -1)[:, 1:].flatten(0, 1)
        logits = self._model.compute_logits(masks).view(num_reqs, width - 1, -1)
        for level in levels.levels:
            shape = (num_reqs, level.width, logits.shape[2])
            of_level = logits[:, level.depth, None].expand(shape).reshape(-1, shape[2])
            self._drafted.draw(batch, num_reqs, levels, level, of_level)
