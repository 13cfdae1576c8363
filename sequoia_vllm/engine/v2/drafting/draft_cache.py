"""Slots and block tables of the draft's layers in vLLM's paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables

from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables


@dataclass(frozen=True)
class DraftCache:
    """The draft's part of the paged KV cache.

    Attributes:
        block_tables: vLLM's, gathered for the batch by the target's pass.
        groups: Index of the cache group of each draft layer.
        windows: Sliding window in tokens, by group; groups without one are absent.
        slot_mappings: int64 ``[groups, rows]``: the draft's own buffer.
    """

    block_tables: BlockTables
    groups: dict[str, int]
    windows: dict[int, int]
    slot_mappings: Tensor

    def slots(
        self, requests: Tensor, query_start_loc: Tensor, positions: Tensor, has_slot: Tensor
    ) -> Tensor:
        """Slots int64 ``[groups, rows]`` of these positions; -1 where there is none.

        Args:
            requests: int64 ``[R]``: request slots; -1: none.
            query_start_loc: int32 ``[R + 1]``: first row of each request, then the end.
            positions: ``[rows]``: position of each row's token.
            has_slot: bool ``[rows]``: False: the row gets -1.
        """
        slots = self.block_tables.compute_slot_mappings(
            requests,
            query_start_loc,
            torch.where(has_slot, positions, 0).long(),
            len(positions),
            out=self.slot_mappings,
        )
        return slots.masked_fill_(~has_slot, PAD_SLOT_ID)

    def leave_out_before_windows(self, slots: Tensor, positions: Tensor, computed: Tensor) -> None:
        """Takes away the slots, in place, of tokens that no later token's sliding window reaches.

        vLLM frees a block when the target is past it, also where the draft has not read it yet.
        The block may already belong to another request.

        Args:
            slots: int64 ``[groups, rows]``, from `slots`.
            positions: ``[rows]``: position of each row's token.
            computed: ``[rows]``: tokens of the row's request that the target had computed
                before the step.
        """
        for group, window in self.windows.items():
            slots[group].masked_fill_(positions < computed - window + 1, PAD_SLOT_ID)

    def by_layer(self, slots: Tensor) -> dict[str, Tensor]:
        """Each draft layer's row of ``slots``."""
        return {name: slots[group] for name, group in self.groups.items()}

    def inputs(self, max_requests: int) -> DraftInputs:
        """Buffers for passes with equally many rows per request, up to the rows of the slots."""
        tables = PagedTables.of(self.block_tables.input_block_tables, self.block_tables.block_sizes)
        return DraftInputs.empty(tables, self.slot_mappings.shape[1], max_requests)
