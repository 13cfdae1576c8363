"""Verification of token trees on the GPU: one launch, or two, and nothing waits for the host."""

from __future__ import annotations

import triton

from sequoia_vllm.kernels import target_statistics as statistics
from sequoia_vllm.kernels.trees_to_verify import TreesToVerify
from sequoia_vllm.kernels.verify_kernels import verify_kernel

# A lane's rejected tokens are bits of an int64.
_TOKENS_PER_LANE = 64
# What one program reads a row with, measured on an H100 (see docs/benchmarks.md): of 4, 8
# and 16 warps, 2048 and 4096 lanes, and 1 to 4 stages the quickest for vocabularies of
# 32,000 and 128,256 tokens. More lanes, which only vocabularies above 131,072 tokens
# get, are twice the registers; stages are slower with them.
_FEWEST_LANES = 2048
NUM_WARPS = 16
_STAGES, _STAGES_OF_MORE_LANES = 3, 1


def verify_trees(
    trees: TreesToVerify,
    tables: None = None,
    *,
    any_sampled: bool = True,
    any_matched: bool = True,
    most_nodes: int | None = None,
) -> None:
    """Walks every request's tree, and writes what it accepts and emits.

    A request in mode SAMPLED goes by Algorithm 2, whose decisions are those of
    `sequoia_vllm.testing.verification`. Its emitted tokens have the law of
    sampling the target one token at a time, if the children of each node are the
    ordered draws without replacement that `sequoia_vllm.kernels.children` makes. In
    the other modes the target's token after each node is given: it is emitted, and
    the walk goes on where a child carries it (nowhere, in mode SKIP).

    Launchers of other methods (`sequoia_vllm.verification.methods`) are called alike.

    A child whose token is -1 was not drawn: it is not accepted, and in mode SAMPLED
    it ends its node's children, as later ones were drawn knowing what is missing.

    No argument is read on the host, so a CUDA graph may hold the launches. A request's
    result does not depend on its neighbours, but for the last bits of its rows' sums,
    which are taken otherwise where rows are many.

    Args:
        trees: What to verify.
        tables: What the launcher needs of the tree (`VerificationMethod.tree_tables`): nothing.
        any_sampled, any_matched: False saves launches, where no request is in mode SAMPLED,
            or all are.
        most_nodes: No request has more rows; saves programs and launches.

    Raises:
        ValueError: See `TreesToVerify.check`.
    """
    looks = any_sampled and statistics.pays_off(len(trees.logits), trees.logits.device)
    _walk(trees, trees.most_nodes(most_nodes) if looks else 0, walks_sampled=True)


def match_trees(trees: TreesToVerify) -> None:
    """`verify_trees` without requests in mode SAMPLED: these accept and emit nothing."""
    _walk(trees, 0, walks_sampled=False)


def _walk(trees: TreesToVerify, looked_at: int, walks_sampled: bool) -> None:
    """Launches the walk, after a look at so many rows of each request at most, unless 0."""
    trees.check()
    if len(trees.num_sampled) == 0:
        return
    found = trees.draft_stats  # not read
    if looked_at:
        found = statistics.target_statistics(
            trees.logits, trees.target_temperatures, trees.modes, trees.cu_num_logits, looked_at
        )  # fmt: skip
    verify_kernel[(len(trees.num_sampled),)](
        trees.logits, trees.target_temperatures, found, int(looked_at > 0), int(walks_sampled),
        trees.tokens, trees.target_tokens, trees.cu_num_logits, trees.modes, trees.positions,
        trees.seeds, trees.children, trees.inner_index, trees.draft_logits, trees.draft_stats,
        trees.state_rows, trees.draft_temperatures,
        trees.sampled_tokens, trees.num_sampled, trees.accepted,
        *trees.sizes, *trees.result_sizes,
        BRANCHES=triton.next_power_of_2(trees.children.shape[1]),
        **lane_constants(trees.vocabulary, trees.sampled_tokens.shape[1]), num_warps=NUM_WARPS,
    )  # fmt: skip


def lane_constants(vocabulary: int, columns: int) -> dict[str, int]:
    """How one program reads a row of logits and writes ``columns`` tokens: for compilation."""
    lanes = max(_FEWEST_LANES, triton.next_power_of_2(-(-vocabulary // _TOKENS_PER_LANE)))
    return {
        "LANES": lanes,
        "STEPS": triton.next_power_of_2(-(-vocabulary // lanes)),
        "COLUMNS": triton.next_power_of_2(columns),
        "BLOCKS": statistics.padded_blocks(vocabulary),
        "STAGES": _STAGES if lanes == _FEWEST_LANES else _STAGES_OF_MORE_LANES,
    }
