"""Verification of token trees on the GPU: one launch, or two, and nothing waits for the host."""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from sequoia_vllm.kernels import target_statistics as statistics
from sequoia_vllm.kernels.scoring_inputs import VerifierInputs
from sequoia_vllm.kernels.tree_shapes import rows_per_slot
from sequoia_vllm.kernels.verify_kernels import verify_kernel

# A lane's rejected tokens are bits of an int64.
_TOKENS_PER_LANE = 64
# How one program reads a row. On an H100 we timed 4, 8 and 16 warps, 2048 and 4096 lanes, and 1 to
# 4 stages, for vocabularies of 32,000 and 128,256 tokens. These are the quickest
# (docs/notebook/2026-11-22-h100.md). More lanes, which only vocabularies above 131,072 tokens get,
# need twice the registers, and stages are slower with them.
_FEWEST_LANES = 2048
NUM_WARPS = 16
_STAGES, _STAGES_OF_MORE_LANES = 3, 1


@dataclass(frozen=True)
class TreesToVerify:
    """R requests' trees: of one shape or each its own, or the first nodes; memory for results.

    Request r's rows are ``cu_num_logits[r]`` to ``cu_num_logits[r + 1]``, one per node, the
    root first. With one row it has no drafts and emits one token; with none, it emits nothing.
    """

    logits: Tensor
    """``[rows, V]``, float32, bfloat16 or float16: the target's, final but for
    ``target_temperatures`` (with penalties and truncation; excluded tokens -inf). A row needs one
    finite entry, and has neither NaN nor +inf."""
    target_temperatures: Tensor
    """float32 ``[R]``, positive in mode SAMPLED, and not used in others: what logits are to be
    divided by."""
    inputs: VerifierInputs
    """T is ``rows``. Temperatures are the draft's, positive. The root's token is not read. Tokens
    and rows of states may be int32 or int64."""
    target_tokens: Tensor
    """int64 ``[rows]``: the target's token after each node. Not read in mode SAMPLED."""
    cu_num_logits: Tensor  # int32 ``[R + 1]``
    children: Tensor  # int32 ``[N, b]``, or by slot: nodes below each in draft order, then -1
    inner_index: Tensor  # int32 ``[N]``, or by slot: where a node's draft logits are; leaves: -1
    draft_logits: Tensor  # ``[S, I, V]``, any of the types above: what children were drawn from
    draft_stats: Tensor
    """float32 ``[S, I, 2]``: maximum of logits / temperature, and sum of exp(logits / temperature -
    maximum)."""
    sampled_tokens: Tensor
    """int64 ``[R, W]``, W > D; written: the accepted path's tokens, the target's own token after
    it, then -1."""
    num_sampled: Tensor  # int32 ``[R]``; written: how many those are
    accepted: Tensor
    """int32 ``[R, D]``, D at least the tree's depth; written: the accepted path below the root,
    then -1."""

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.logits.shape[1]

    @property
    def read(self) -> dict[str, Any]:
        """What kernels that verify read, with its sizes and strides: by their arguments' names."""
        inputs, logits, stats = self.inputs, self.draft_logits, self.draft_stats
        return {
            "logits": self.logits, "target_temperatures": self.target_temperatures,
            "tokens": inputs.tokens, "cu_num_logits": self.cu_num_logits, "modes": inputs.modes,
            "positions": inputs.root_positions, "seeds": inputs.seeds, "children": self.children,
            "inner_index": self.inner_index, "draft_logits": logits, "draft_stats": stats,
            "state_rows": inputs.state_rows, "draft_temperatures": inputs.temperatures,
            "vocabulary": self.vocabulary, "num_states": len(logits),
            "logits_stride": self.logits.stride(0), "branches": self.children.shape[-1],
            "children_stride": self.children.stride(-2), "draft_state_stride": logits.stride(0),
            "draft_inner_stride": logits.stride(1), "stats_state_stride": stats.stride(0),
            "stats_inner_stride": stats.stride(1),
        }  # fmt: skip

    @property
    def written(self) -> dict[str, Any]:
        """What they write: tokens and paths, with columns and strides."""
        tokens, accepted = self.sampled_tokens, self.accepted
        return {
            "sampled_tokens": tokens, "num_sampled": self.num_sampled, "accepted": accepted,
            "columns": tokens.shape[1], "sampled_stride": tokens.stride(0),
            "path_columns": accepted.shape[1], "accepted_stride": accepted.stride(0),
        }  # fmt: skip

    def most_nodes(self, most: int | None) -> int:
        """Bound on the rows of a request: the smaller of ``most`` and the tree's nodes."""
        all_nodes = self.children.shape[-2]
        return min(most or all_nodes, all_nodes)

    def target_statistics(self, most_nodes: int) -> Tensor:
        """Statistics of the target's rows, at most so many of each request: `target_statistics`."""
        return statistics.target_statistics(
            self.logits, self.target_temperatures, self.inputs.modes, self.cu_num_logits, most_nodes
        )

    def check(self) -> None:
        """Checks what the kernels rely on, as far as shapes and strides tell.

        Raises:
            ValueError: The vocabularies of target and draft differ, a row of logits is not
                contiguous, or ``sampled_tokens`` has no room for the last token.
        """
        if self.vocabulary != (drafted := self.draft_logits.shape[2]):
            raise ValueError(
                f"the target has {self.vocabulary} logits per row, the draft {drafted}"
            )
        if self.logits.stride(1) != 1 or self.draft_logits.stride(2) != 1:
            raise ValueError("a row of logits must lie side by side (last stride 1)")
        if self.sampled_tokens.shape[1] <= self.accepted.shape[1]:
            raise ValueError(
                f"{self.sampled_tokens.shape[1]} columns of tokens do not hold a path of"
                f" {self.accepted.shape[1]} and the token after it"
            )


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
    `tests.oracles.verification`. Its emitted tokens have the law of sampling the target one token
    at a time. For that the children of each node must be the ordered draws without replacement
    that `DraftedTrees.draw` makes. In the other modes the target's token after each node is given.
    It is emitted, and the walk goes on where a child carries it (nowhere, in mode SKIP).

    Launchers of other methods (`sequoia_vllm.verification.methods`) are called alike.

    A child whose token is -1 was not drawn, and is not accepted. In mode SAMPLED it ends its
    node's children, as later ones were drawn knowing what is missing.

    No argument is read on the host, so a CUDA graph may hold the launches. A request's result does
    not depend on its neighbours, except for the last bits of its rows' sums: large batches add them
    up in another order.

    Args:
        tables: What the launcher needs of the tree (`VerificationMethod.tree_tables`): nothing.
        any_sampled, any_matched: False saves launches, where no request is in mode SAMPLED,
            or all are.
        most_nodes: No request has more rows; saves programs and launches.

    Raises:
        ValueError: See `TreesToVerify.check`.
    """
    looks = any_sampled and statistics.pays_off(len(trees.logits), trees.logits.device)
    walk(trees, looked_at=trees.most_nodes(most_nodes) if looks else 0)


def walk(trees: TreesToVerify, looked_at: int = 0, walks_sampled: bool = True) -> None:
    """Launches the walk, after a look at so many rows of each request at most, unless 0.

    Without ``walks_sampled`` requests in mode SAMPLED accept and emit nothing.
    """
    trees.check()
    if len(trees.num_sampled) == 0:
        return
    found = trees.target_statistics(looked_at) if looked_at else trees.draft_stats  # not read
    verify_kernel[(len(trees.num_sampled),)](
        **trees.read, **trees.written, target_tokens=trees.target_tokens,
        statistics=found, has_statistics=int(looked_at > 0), walks_sampled=int(walks_sampled),
        slots=trees.inputs.slots, slot_rows=rows_per_slot(trees.children, 2),
        BRANCHES=triton.next_power_of_2(trees.children.shape[-1]),
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
