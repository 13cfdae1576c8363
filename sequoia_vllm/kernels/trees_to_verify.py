"""What the kernels that verify trees read and write."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TreesToVerify:
    """R requests' trees: all of one shape, or the first nodes of it; and memory for results.

    Request r's rows are ``cu_num_logits[r]`` to ``cu_num_logits[r + 1]``, one per node, the
    root first. With one row it has no drafts and emits one token; with none, it emits nothing.

    Attributes:
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
    """

    logits: Tensor
    target_temperatures: Tensor
    tokens: Tensor
    target_tokens: Tensor
    cu_num_logits: Tensor
    modes: Tensor
    positions: Tensor
    seeds: Tensor
    children: Tensor
    inner_index: Tensor
    draft_logits: Tensor
    draft_stats: Tensor
    state_rows: Tensor
    draft_temperatures: Tensor
    sampled_tokens: Tensor
    num_sampled: Tensor
    accepted: Tensor

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.logits.shape[1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes and strides of what is read, in the kernels' order."""
        return (
            self.vocabulary, len(self.draft_logits), self.logits.stride(0),
            self.children.shape[1], self.children.stride(0),
            self.draft_logits.stride(0), self.draft_logits.stride(1),
            self.draft_stats.stride(0), self.draft_stats.stride(1),
        )  # fmt: skip

    @property
    def result_sizes(self) -> tuple[int, ...]:
        """Columns and strides of the tokens and paths that are written."""
        return (
            self.sampled_tokens.shape[1], self.sampled_tokens.stride(0),
            self.accepted.shape[1], self.accepted.stride(0),
        )  # fmt: skip

    def most_nodes(self, most: int | None) -> int:
        """Rows that no request has more of: ``most`` and the tree's nodes are bounds."""
        all_nodes = len(self.children)
        return min(most or all_nodes, all_nodes)

    def check(self) -> None:
        """Whether they fit together.

        Raises:
            ValueError: If the vocabularies of target and draft differ, a row of logits
                is not contiguous, or ``sampled_tokens`` has no room for the last token.
        """
        if self.vocabulary != self.draft_logits.shape[2]:
            raise ValueError(
                f"the target has {self.vocabulary} logits per row, the draft "
                f"{self.draft_logits.shape[2]}"
            )
        if self.logits.stride(1) != 1 or self.draft_logits.stride(2) != 1:
            raise ValueError("a row of logits must lie side by side (last stride 1)")
        if self.sampled_tokens.shape[1] <= self.accepted.shape[1]:
            raise ValueError(
                f"{self.sampled_tokens.shape[1]} columns of tokens do not hold a path of"
                f" {self.accepted.shape[1]} and the token after it"
            )
