"""CPU_ATTN with trees, for Model Runner V2.

vLLM's CPU builds run the V2 runner where Triton has a CPU driver. The attention
and the cache are those of the V1 runner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from sequoia_vllm.attention.cpu_kernel import CacheGroup
from sequoia_vllm.engine.cpu_attention import (
    CPUTreeAttentionMetadata,
    TreeQueries,
    unsupported_attention,
)
from sequoia_vllm.engine.v2.backend import DraftQueries, TreeBackend
from sequoia_vllm.engine.v2.scoring import ScoringTrees

_CLASS = "sequoia_vllm.engine.cpu_attention.CPUTreeAttentionBackend"


class CPUTreeBackend(TreeBackend):
    """Tree attention in the compiled CPU kernel.

    Args:
        ancestors: bool ``[N, N]``: the engine's tree.
    """

    def __init__(self, ancestors: Tensor) -> None:
        self._ancestors = ancestors
        self._groups: list[tuple[str, CacheGroup]] = []

    @contextmanager
    def replace_attention(self) -> Iterator[None]:
        """Registers our backend under the name that CPU layers look up."""
        selector._cached_get_attn_backend.cache_clear()
        register_backend(AttentionBackendEnum.CPU_ATTN, _CLASS)
        try:
            yield
        finally:
            AttentionBackendEnum.CPU_ATTN.clear_override()
            selector._cached_get_attn_backend.cache_clear()

    def unsupported_attention(self, layer_name: str, impl: Any) -> str | None:
        """See `cpu_attention.unsupported_attention`."""
        return unsupported_attention(layer_name, impl)

    def scoring_queries(self, trees: ScoringTrees, metadata: Any) -> TreeQueries:
        """Rows and masks of the trees."""
        lengths = trees.query_start_loc.diff()
        offsets = torch.arange(trees.max_nodes)
        rows = trees.query_start_loc[:-1, None] + offsets
        nodes = trees.max_nodes
        return TreeQueries(
            rows=torch.where(offsets < lengths[:, None], rows, -1).long(),
            block_table=metadata.block_table[: trees.num_requests],
            context_lens=trees.context_lens.long(),
            num_nodes=lengths.long(),
            ancestors=self._ancestors[:nodes, :nodes],
            max_keys=trees.max_keys,
            only_trees=trees.only_trees,
        )

    def draft_metadata(
        self, queries: DraftQueries, query_start_loc: Tensor, block_table: Tensor, slots: Tensor
    ) -> CPUTreeAttentionMetadata:
        """Metadata whose rows are all tree nodes."""
        num_reqs, nodes = len(block_table), queries.first + queries.width
        context_lens = queries.context_lens.long()
        return CPUTreeAttentionMetadata(
            num_actual_tokens=num_reqs * queries.width,
            max_query_len=queries.width,
            query_start_loc=query_start_loc,
            max_seq_len=queries.max_keys,
            seq_lens=context_lens,
            block_table=block_table,
            slot_mapping=slots,
            scheduler_metadata=None,
            tree=TreeQueries(
                rows=torch.arange(num_reqs * queries.width).view(num_reqs, queries.width),
                block_table=block_table,
                context_lens=context_lens,
                num_nodes=(queries.max_slots - context_lens).clamp_(max=nodes),
                ancestors=queries.ancestors[queries.first : nodes, :nodes],
                max_keys=queries.max_keys,
                only_trees=True,
            ),
        )

    def commit(
        self, caches: dict[str, Tensor], metadata: dict[str, Any], trees: ScoringTrees,
        accepted: Tensor,
    ) -> None:  # fmt: skip
        """In the compiled CPU kernel, for all layers that share a slot mapping at once."""
        place = torch.arange(1, accepted.shape[1] + 1)
        moves = (accepted >= 0) & (accepted != place)
        first_row = trees.query_start_loc[:-1, None]
        source, target = (first_row + accepted)[moves], (first_row + place)[moves]
        if len(source) == 0:
            return
        if not self._groups:
            self._groups = _groups(caches, metadata)
        for layer, group in self._groups:
            slots = metadata[layer].slot_mapping
            group.move_tokens(slots[source], slots[target])


def _groups(caches: dict[str, Tensor], metadata: dict[str, Any]) -> list[tuple[str, CacheGroup]]:
    found: dict[tuple[int, torch.Size], list[str]] = {}
    for name, cache in caches.items():
        found.setdefault((id(metadata[name]), cache.shape), []).append(name)
    return [(names[0], CacheGroup([caches[name] for name in names])) for names in found.values()]
