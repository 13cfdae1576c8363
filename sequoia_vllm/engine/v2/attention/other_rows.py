"""What vLLM's own attention does in a batch with trees: prompts, and requests without drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2


@dataclass(frozen=True)
class OtherChains:
    """Rows that are not tree nodes, after all nodes: chains of tokens, as vLLM expects them.

    Attributes:
        first: The first such row.
        metadata: vLLM's metadata, as if the batch had only their requests.
    """

    first: int
    metadata: Any


def other_chains(trees: ScoringTreesV2, metadata: Any) -> OtherChains | None:
    """vLLM's metadata of the batch without these trees; None: nothing is left.

    Tensors that begin in the middle of a buffer are copied: Triton compiles a kernel for the
    alignment of its pointers, and would compile vLLM's again while requests wait.
    """
    if (rows := trees.others) is None:
        return None
    begin = trees.num_requests
    alone = replace(
        metadata,
        num_actual_tokens=metadata.num_actual_tokens - rows.first,
        max_query_len=rows.max_rows,
        query_start_loc=metadata.query_start_loc[begin:] - rows.first,
        max_seq_len=rows.max_keys,
        seq_lens=metadata.seq_lens[begin:].clone(),
        block_table=metadata.block_table[begin:].clone(),
        scheduler_metadata=None,  # FlashAttention 3's plan is for all rows; now each layer plans
        **_ranges_of_images(metadata, begin, rows.first),
    )
    return OtherChains(rows.first, alone)


def _ranges_of_images(metadata: Any, request: int, row: int) -> dict[str, Any]:
    """Where tokens of images see each other, without the first requests and their rows.

    Of models whose images attend in both directions: Triton's by request, FlashAttention's by row.
    """
    ranges: dict[str, Any] = {}
    if (by_request := getattr(metadata, "mm_prefix_range_tensor", None)) is not None:
        ranges["mm_prefix_range_tensor"] = by_request[request:].clone()
        ranges["mm_prefix_range"] = {
            index - request: found
            for index, found in metadata.mm_prefix_range.items()
            if index >= request
        }
    if (by_row := getattr(metadata, "mm_prefix_query_range_tensor", None)) is not None:
        ranges["mm_prefix_query_range_tensor"] = by_row[row:].clone()
    return ranges
