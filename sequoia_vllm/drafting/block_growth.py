"""Growth by a drafter that reads all levels in one pass (DFlash, arXiv 2602.06036).

Some related drafters correct what the pass predicts by the tokens that were drafted meanwhile.
Then Q at a node depends on the node's token, too.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.drafting.growth import DraftModel, DraftStates, TreeGrowth
from sequoia_vllm.drafting.tree_tables import DraftLevels

LogitsAt = Callable[[int, Tensor], Tensor]
"""Draft logits ``[R * m, V]`` at the m nodes of a depth (0: the roots) of R requests' trees, by the
depth and the nodes' tokens int ``[R, m]``; request after request, from one pass over all levels."""


class BlockModel(DraftModel):
    """The interface that growth needs of such a drafter. Its forward leaves nothing for later
    passes."""

    @abstractmethod
    def store_context(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Makes keys and values of committed tokens from the target's states, and keeps them.

        Args:
            states: ``[rows, F]``: `combine_hidden_states` of the target's states.
            positions: int64 ``[rows]``.
            slots: int64 ``[groups, rows]``: where they go; -1: nowhere.
        """

    @abstractmethod
    def block_logits(self, hidden: Tensor, context: Tensor, roots: Tensor) -> LogitsAt:
        """Logits at the nodes of R requests' trees.

        Args:
            hidden: ``[R, L, H]``: states of a pass at the positions that predict a level each.
            context: ``[R, F]``: what keys and values of the last token before each root were
                made from.
            roots: int32 ``[R, 1]``: the roots' tokens.
        """


class BlockGrowth(TreeGrowth):
    """Grows trees from one forward over a block of each request: its root, then masks.

    Q at a node is what the level's position predicts. Some drafters also take the node's own token
    into account (`LogitsAt`). The children of each node are drawn independently: verification
    assumes that Q at a node does not depend on what was drawn at others.

    Args:
        mask_token: The token at positions that are predicted.
        root_predicts: The root's own position predicts the first level; else the first mask's.
        levels: Every block's, of trees that are less deep, too; None: each tree's own.
        shared: See `TreeGrowth`; its model is a `BlockModel`.
    """

    _model: BlockModel

    def __init__(
        self, *, mask_token: int, root_predicts: bool, levels: int | None, **shared: Any
    ) -> None:
        super().__init__(**shared)
        self._mask_token = mask_token
        self._before = 0 if root_predicts else 1
        self._levels = levels
        self._sees_all = torch.ones_like(self._chains[0])

    def read_committed(
        self,
        num_reqs: int,
        num_rows: int,
        most: int,
        max_keys: int,
        target_states: Tensor | None = None,
    ) -> DraftStates:
        """See `TreeGrowth.read_committed`; keeps contexts, which attends to nothing.

        Returns:
            What the contexts were made from, ``num_rows`` rows.
        """
        inputs = self.committed_inputs(num_reqs, num_rows)
        states = self.combined_states(num_rows, target_states)
        assert states is not None
        self._model.store_context(states, inputs.positions[:num_rows], inputs.slots[:, :num_rows])
        return DraftStates(states)

    def _grow_below(
        self, roots: DraftStates, num_reqs: int, levels: DraftLevels, max_keys: int
    ) -> None:
        """One forward over every request's block, then the children of each level's nodes."""
        batch, width = self._batch, (self._levels or levels.tree.depth) + self._before
        self._inputs.read_block(batch, num_reqs, width, self._mask_token)
        states = self._forward(
            batch.roots[:num_reqs], num_reqs * width, 0, width, self._sees_all, max_keys, None
        )
        tokens = self._inputs.token_ids[: num_reqs * width].view(num_reqs, width)[:, :1]
        predicting = states.hidden.view(num_reqs, width, -1)[:, self._before :]
        logits_at = self._model.block_logits(predicting, roots.hidden, tokens)
        for level in levels.levels:
            if level.depth > 0:
                tokens = self._drafted.tokens[:num_reqs].index_select(1, level.nodes)
            self._drafted.draw(batch, num_reqs, levels, level, logits_at(level.depth, tokens))
