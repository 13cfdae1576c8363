"""Layers with chunked local attention (Llama 4): a token sees those of its own chunk of positions.

vLLM cuts requests at the chunks' ends, into requests of their own. For that it waits for their
lengths, and captures no whole CUDA graph. But a tree's nodes lie by depth, not by slot, and our
kernel reads lengths on the device. It takes trees, and all rows of steps without a long prompt, as
`sequoia_vllm.kernels.chunks` has them. Longer prompts are cut as vLLM cuts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

from sequoia_vllm.engine.v2.attention.attention_gpu import GPUTreeForward, GPUTreeQueries
from sequoia_vllm.engine.v2.attention.mla_layers import chains_of
from sequoia_vllm.engine.v2.attention.scoring import OtherRows, ScoringTreesV2
from sequoia_vllm.kernels.chunks import from_chunk
from sequoia_vllm.kernels.node_masks import NodeMask
from sequoia_vllm.kernels.tree_attention import EXTRA_SIZES


@dataclass(frozen=True)
class RowsInChunks:
    """The rows of a step: those that our kernel takes, and the others, which vLLM cuts."""

    parts: tuple[GPUTreeQueries, ...]
    others: OtherRows | None

    @property
    def only_trees(self) -> bool:
        """True if our kernel takes every row."""
        return self.others is None


def rows_in_chunks(
    trees: ScoringTreesV2 | None,
    metadata: Any,
    chain: Tensor,
    queries: Callable[..., GPUTreeQueries],
) -> RowsInChunks:
    """What layers with chunks attend to.

    Args:
        trees: The batch's, whose requests come first; None: it has none.
        metadata: vLLM's, of all requests, with ``cut`` of `chunked_backend`.
        chain: Ancestors of the longest chain that our kernel takes.
        queries: Makes what it takes of nodes and a block table.
    """
    rows, begin, parts = OtherRows(0, metadata.max_query_len, metadata.max_seq_len), 0, []
    if trees is not None:
        begin = trees.num_requests
        parts.append(queries(trees, metadata.block_table[:begin]))
        if trees.others is None:
            return RowsInChunks(tuple(parts), None)
        rows = trees.others
    if rows.max_rows > len(chain):
        return RowsInChunks(tuple(parts), replace(rows, metadata=metadata.cut(begin, rows)))
    lengths, starts = metadata.seq_lens[begin:], metadata.query_start_loc[begin:]
    chains = chains_of(starts, lengths, chain, metadata)
    return RowsInChunks((*parts, queries(chains, metadata.block_table[begin:])), None)


class ChunkedTreeForward(GPUTreeForward):
    """Before an implementation with trees."""

    chunk: int
    attends_to_contexts = False

    def _forward_trees(
        self, layer: Any, query: Tensor, kv_cache: Tensor, tree: Any, output: Tensor
    ) -> None:
        for part in getattr(tree, "parts", (tree,)):
            if self.chunk not in part.in_chunks:
                shifted = from_chunk(part, part.mask_for(), self.chunk, kv_cache.shape[2])
                part.in_chunks[self.chunk] = replace(part, plans={}, **shifted)
            super()._forward_trees(layer, query, kv_cache, part.in_chunks[self.chunk], output)

    def _mask_of(self, tree: GPUTreeQueries) -> NodeMask:
        assert tree.mask is not None
        return tree.mask


def limits_of(impl: Any, nodes: int) -> dict[str, bool]:
    """What our kernel cannot serve of chunks and values, beside trees of so many nodes."""
    chunk = getattr(impl, "chunk", nodes)
    keys = getattr(impl, "head_size", 0)
    values = getattr(impl, "value_size", keys)
    return {
        f"chunks of {chunk} tokens, fewer than a tree's {nodes} nodes": chunk < nodes,
        f"keys of {keys} channels and values of {values}": keys - values not in (0, *EXTRA_SIZES),
    }


@cache  # vLLM groups layers by backend
def chunked_backend(backend: Any, chunk: int) -> Any:
    """Replaces vLLM's `create_chunked_local_attention_backend` of one of our backends."""

    class ChunkedTreeBuilder(backend.get_builder_cls()):  # type: ignore[misc]
        """Builds vLLM's metadata of whole requests, and of chunks where they are asked for."""

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            """See vLLM's; adds ``cut``."""
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.cut = partial(self._cut, common_attn_metadata)
            return metadata

        def _cut(self, common: Any, begin: int, rows: OtherRows) -> Any:
            """Metadata of chunks of the requests from ``begin`` on; waits for their lengths."""
            alone = replace(
                common,
                query_start_loc=common.query_start_loc[begin:] - rows.first,
                query_start_loc_cpu=common.query_start_loc_cpu[begin:] - rows.first,
                seq_lens=common.seq_lens[begin:],
                num_actual_tokens=common.num_actual_tokens - rows.first,
                block_table_tensor=common.block_table_tensor[begin:],
            )
            block_size = self.kv_cache_spec.block_size
            chunks, _ = make_local_attention_virtual_batches(chunk, alone, block_size)
            # No plan of FlashAttention 3's: its buffer has room for one of each request.
            return super().build(0, chunks, fast_build=True)

    class ChunkedTreeImpl(ChunkedTreeForward, backend.get_impl_cls()):  # type: ignore[misc]
        """An implementation with trees, in chunks."""

    ChunkedTreeImpl.chunk = chunk
    own = {
        "get_builder_cls": staticmethod(lambda: ChunkedTreeBuilder),
        "get_impl_cls": staticmethod(lambda: ChunkedTreeImpl),
    }
    return type(f"Chunked{chunk}{backend.__name__}", (backend,), own)
