"""Verification of token trees on the GPU: one launch, or two, and nothing waits for the host."""

from __future__ import annotations

import triton
from torch import Tensor

from sequoia_vllm.kernels import target_statistics as statistics
from sequoia_vllm.kernels.traversal import TraversalOrder, traverse_trees
from sequoia_vllm.kernels.verify_kernels import verify_kernel

# A lane's rejected tokens are bits of an int64.
_TOKENS_PER_LANE = 64
# What one program reads a row with, measured on an H100 (see docs/benchmarks.md): of 4, 8
# and 16 warps, 2048 and 4096 lanes, and 1 to 4 stages the quickest for vocabularies of
# 32,000 and 128,256 tokens. More lanes, which only vocabularies above 131,072 tokens
# get, are twice the registers; stages are slower with them.
_FEWEST_LANES = 2048
_NUM_WARPS = 16
_STAGES, _STAGES_OF_MORE_LANES = 3, 1


def verify_trees(
    *,
    logits: Tensor,
    target_temperatures: Tensor,
    tokens: Tensor,
    target_tokens: Tensor,
    cu_num_logits: Tensor,
    modes: Tensor,
    positions: Tensor,
    seeds: Tensor,
    children: Tensor,
    inner_index: Tensor,
    draft_logits: Tensor,
    draft_stats: Tensor,
    state_rows: Tensor,
    draft_temperatures: Tensor,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    accepted: Tensor,
    any_sampled: bool = True,
    any_matched: bool = True,
    traversal: TraversalOrder | None = None,
    most_nodes: int | None = None,
) -> None:
    """Walks every request's tree, and writes what it accepts and emits.

    All requests use one tree, or the first nodes of it: request r's rows are
    ``cu_num_logits[r]`` to ``cu_num_logits[r + 1]``, one per node, the root first.
    With one row it has no drafts and emits one token; with none, it emits nothing.

    A request in mode SAMPLED goes by Algorithm 2, or by traversal, whose decisions are
    those of `sequoia_vllm.testing.verification`. Its emitted tokens have the law of
    sampling the target one token at a time, if the children of each node are the
    ordered draws without replacement that `sequoia_vllm.kernels.children` makes. In
    the other modes the target's token after each node is given: it is emitted, and
    the walk goes on where a child carries it (nowhere, in mode SKIP).

    A child whose token is -1 was not drawn: it is not accepted, and in mode SAMPLED
    it ends its node's children, as later ones were drawn knowing what is missing.

    No argument is read on the host, so a CUDA graph may hold the launches. A request's
    result does not depend on its neighbours, but for the last bits of its rows' sums,
    which are taken otherwise where rows are many.

    Args:
        logits: ``[rows, V]``, float32, bfloat16 or float16: the target's, final but for
            ``target_temperatures`` (with penalties and truncation; excluded tokens
            -inf). A row needs one finite entry, and has neither NaN nor +inf.
        target_temperatures: float32 ``[R]``, positive in mode SAMPLED, and not used in
            others: what logits are to be divided by.
        tokens: int32 or int64 ``[rows]``: each node's drafted token; the root's is
            not read.
        target_tokens: int64 ``[rows]``: the target's token after each node. Not read
            in mode SAMPLED.
        cu_num_logits: int32 ``[R + 1]``.
        modes: int32 ``[R]``, of `sequoia_vllm.kernels.modes`.
        positions: int32 ``[R]``: the root's position.
        seeds: int64 ``[R]``: of the request's random numbers.
        children: int32 ``[N, b]``: the nodes below each node in draft order, then -1.
        inner_index: int32 ``[N]``: where a node's draft logits are; -1 for leaves.
        draft_logits: ``[S, I, V]``, any of the types above: what children were drawn
            from.
        draft_stats: float32 ``[S, I, 2]``: maximum of logits / temperature, and sum
            of exp(logits / temperature - maximum).
        state_rows: int32 or int64 ``[R]``: the request's row in those two.
        draft_temperatures: float32 ``[R]``, positive.
        sampled_tokens: int64 ``[R, W]``, W > D; written: the accepted path's tokens,
            the target's own token after it, then -1.
        num_sampled: int32 ``[R]``; written: how many those are.
        accepted: int32 ``[R, D]``, D at least the tree's depth; written: the accepted
            path below the root, then -1.
        any_sampled, any_matched: False saves launches, where no request is in mode SAMPLED,
            or all are.
        traversal: Of the tree, to verify those in mode SAMPLED by traversal.
        most_nodes: What no request has more rows than; saves traversal launches.

    Raises:
        ValueError: If the vocabularies of target and draft differ, a row of logits
            is not contiguous, or ``sampled_tokens`` has no room for the last token.
    """
    _check(logits, draft_logits, sampled_tokens, accepted)
    requests, vocabulary = len(num_sampled), logits.shape[1]
    if requests == 0:
        return
    constants = _constants(vocabulary, sampled_tokens.shape[1])
    few = any_sampled and traversal is None and statistics.pays_off(len(logits), logits.device)
    found = draft_stats  # not read
    if few:
        found = statistics.target_statistics(
            logits, target_temperatures, modes, cu_num_logits, len(children)
        )
    if any_matched or traversal is None:
        verify_kernel[(requests,)](
            logits, target_temperatures, found, int(few), int(traversal is None),
            tokens, target_tokens, cu_num_logits, modes, positions, seeds, children,
            inner_index, draft_logits, draft_stats, state_rows, draft_temperatures,
            sampled_tokens, num_sampled, accepted,
            vocabulary, len(draft_logits), logits.stride(0), children.shape[1],
            children.stride(0), draft_logits.stride(0), draft_logits.stride(1),
            draft_stats.stride(0), draft_stats.stride(1),
            sampled_tokens.shape[1], sampled_tokens.stride(0),
            accepted.shape[1], accepted.stride(0),
            BRANCHES=triton.next_power_of_2(children.shape[1]),
            **constants, num_warps=_NUM_WARPS,
        )  # fmt: skip
    if any_sampled and traversal is not None:
        traverse_trees(
            order=traversal, most_nodes=min(most_nodes or len(children), len(children)),
            logits=logits, target_temperatures=target_temperatures, tokens=tokens,
            cu_num_logits=cu_num_logits, modes=modes, positions=positions, seeds=seeds,
            children=children, inner_index=inner_index, draft_logits=draft_logits,
            draft_stats=draft_stats, state_rows=state_rows,
            draft_temperatures=draft_temperatures, sampled_tokens=sampled_tokens,
            num_sampled=num_sampled, accepted=accepted,
            lanes={**constants, "num_warps": _NUM_WARPS},
        )  # fmt: skip


def _check(logits: Tensor, draft_logits: Tensor, sampled_tokens: Tensor, accepted: Tensor) -> None:
    if logits.shape[1] != draft_logits.shape[2]:
        raise ValueError(
            f"the target has {logits.shape[1]} logits per row, the draft {draft_logits.shape[2]}"
        )
    if logits.stride(1) != 1 or draft_logits.stride(2) != 1:
        raise ValueError("a row of logits must lie side by side (last stride 1)")
    if sampled_tokens.shape[1] <= accepted.shape[1]:
        raise ValueError(
            f"{sampled_tokens.shape[1]} columns of tokens do not hold a path of"
            f" {accepted.shape[1]} and the token after it"
        )


def _constants(vocabulary: int, columns: int) -> dict[str, int]:
    lanes = max(_FEWEST_LANES, triton.next_power_of_2(-(-vocabulary // _TOKENS_PER_LANE)))
    return {
        "LANES": lanes,
        "STEPS": triton.next_power_of_2(-(-vocabulary // lanes)),
        "COLUMNS": triton.next_power_of_2(columns),
        "BLOCKS": statistics.padded_blocks(vocabulary),
        "STAGES": _STAGES if lanes == _FEWEST_LANES else _STAGES_OF_MORE_LANES,
    }
