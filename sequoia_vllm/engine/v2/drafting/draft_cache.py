"""Slots and block tables of the draft's layers in vLLM's paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from sequoia_vllm.engine.runner.attention_layers import freed_behind
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables


@dataclass(frozen=True)
class DraftCache:
    """The draft's part of the paged KV cache.

    Attributes:
        block_tables: vLLM's, gathered for the batch by the target's pass.
        groups: Index of the cache group of each draft layer.
        block_sizes: Tokens per block, by group.
        windows: Sliding window in tokens, by group; groups without one are absent.
        slot_mappings: int64 ``[groups, rows]``: the draft's own buffer.
    """

    block_tables: BlockTables
    groups: dict[str, int]
    block_sizes: dict[int, int]
    windows: dict[int, int]
    slot_mappings: Tensor

    @classmethod
    def of(
        cls,
        block_tables: BlockTables,
        kv_cache_config: KVCacheConfig,
        layers: set[str],
        rows: int,
        depth: int,
        device: torch.device,
    ) -> DraftCache:
        """The part of these layers, for passes of up to so many rows and trees of this depth.

        Raises:
            ValueError: The draft's sliding window is too short for the tree.
        """
        by_index = kv_cache_config.kv_cache_groups
        groups = {
            name: index
            for index, group in enumerate(by_index)
            for name in group.layer_names
            if name in layers
        }
        specs = {index: by_index[index].kv_cache_spec for index in groups.values()}
        windows = {i: w for i, spec in specs.items() if (w := freed_behind(spec)) is not None}
        if windows and min(windows.values()) <= depth + 1:
            raise ValueError(
                f"the draft has a sliding window of {min(windows.values())} tokens, too few for a "
                f"tree of depth {depth}: choose a shallower tree"
            )
        sizes = {index: spec.block_size for index, spec in specs.items()}
        slots = torch.empty(
            block_tables.num_kv_cache_groups, rows, dtype=torch.int64, device=device
        )
        return cls(block_tables, groups, sizes, windows, slots)

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
