"""CPU_ATTN with trees, for Model Runner V2, as on the V1 runner.

vLLM's CPU builds run the V2 runner if Triton has a CPU driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import TreeQueries
from sequoia_vllm.drafting.growth import NodeQueries
from sequoia_vllm.engine.runner.attention_layers import replaced_backends
from sequoia_vllm.engine.runner.cpu_attention import (
    CPU_BACKENDS,
    CPUTreeAttentionMetadata,
    unsupported_attention,
)
from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2, TreeBackend
from sequoia_vllm.kernels.node_masks import seen_nodes
from sequoia_vllm.step.commit import TargetCaches


class CPUTreeBackend(TreeBackend):
    """Tree attention in the compiled CPU kernel."""

    def __init__(self, ancestors: Tensor) -> None:
        self._caches = TargetCaches()

    def replace_attention(self, architectures: Sequence[str]) -> AbstractContextManager[None]:
        """Replaces attention like the V1 runner does."""
        return replaced_backends(CPU_BACKENDS)

    def unsupported_attention(self, layer_name: str, impl: Any) -> str | None:
        """See `cpu_attention.unsupported_attention`."""
        return unsupported_attention(layer_name, impl)

    def scoring_queries(self, trees: ScoringTreesV2 | None, metadata: Any) -> TreeQueries:
        """Rows and masks of the trees."""
        assert trees is not None  # no attention of ours is in other steps
        return TreeQueries(
            rows=_rows_of(trees),
            block_table=metadata.block_table[: trees.num_requests],
            context_lens=trees.context_lens.long(),
            num_nodes=trees.query_start_loc.diff().long(),
            ancestors=seen_nodes(trees)[..., : trees.width, : trees.width],
            max_keys=trees.max_keys,
            only_trees=trees.others is None,
        )

    def draft_metadata(
        self, queries: NodeQueries, block_table: Tensor, slots: Tensor
    ) -> CPUTreeAttentionMetadata:
        """Metadata whose rows are all tree nodes."""
        nodes = queries.first + queries.width
        lengths = queries.query_start_loc.diff()
        assert queries.max_slots is not None
        slots_left = queries.max_slots - queries.context_lens
        tree = TreeQueries(
            rows=_rows_of(queries),
            block_table=block_table,
            context_lens=queries.context_lens.long(),
            num_nodes=torch.minimum(slots_left, queries.first + lengths).long(),
            ancestors=seen_nodes(queries)[..., queries.first : nodes, :nodes],
            max_keys=queries.max_keys,
            only_trees=True,
        )
        return CPUTreeAttentionMetadata.of_trees(tree, slots)

    def commit(
        self, caches: dict[str, Tensor], metadata: dict[str, Any], trees: ScoringTreesV2,
        accepted: Tensor,
    ) -> None:  # fmt: skip
        """Moves keys and values in compiled code, at once for layers that share a slot mapping."""
        starts = trees.query_start_loc
        self._caches.commit(caches, metadata, starts[:-1], starts.diff(), accepted)


def _rows_of(nodes: NodeQueries) -> Tensor:
    """int64 ``[R, width]``: row of each query, -1 past a request's last."""
    lengths, offsets = nodes.query_start_loc.diff(), torch.arange(nodes.width)
    rows = nodes.query_start_loc[:-1, None] + offsets
    return torch.where(offsets < lengths[:, None], rows, -1).long()
