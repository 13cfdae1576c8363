"""Slots and block tables of the draft's layers in vLLM's paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from sequoia_vllm.engine.runner.attention_layers import freed_behind
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables


@dataclass(frozen=True)
class DraftCache:
    """The draft's part of the paged KV cache."""

    block_tables: BlockTables  # vLLM's, gathered for the batch by the target's pass
    groups: dict[str, int]  # index of the cache group of each draft layer
    block_sizes: dict[int, int]  # tokens per block, by group
    windows: dict[int, int]  # sliding window in tokens, by group; groups without one are absent

    @classmethod
    def of(
        cls,
        block_tables: BlockTables,
        kv_cache_config: KVCacheConfig,
        layers: set[str],
        depth: int,
    ) -> DraftCache:
        """The part of these layers, for trees of this depth.

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
        return cls(block_tables, groups, sizes, windows)

    def by_layer(self, slots: Tensor) -> dict[str, Tensor]:
        """Each draft layer's row of ``slots``."""
        return {name: slots[group] for name, group in self.groups.items()}

    def inputs(self, rows: int, all_token_ids: Tensor, longest: int) -> DraftInputs:
        """Buffers for passes of up to so many rows; arguments as of `DraftInputs`."""
        tables, sizes = self.block_tables.input_block_tables, self.block_tables.block_sizes
        paged = PagedTables.of(tables, sizes, self.windows)
        return DraftInputs.empty(paged, rows, all_token_ids, longest)
