# mypy: allow-untyped-defs
"""Branches on GPUs: told tokens in a row, in the place of a request's drafted tree.

Whether a request has a branch follows from its committed text alone. So its law is exact if each
node is matched against the token that the target draws there: Q is one at the told token.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BRANCH = -1
"""In the place of a request's row of draft logits: it has a branch, and needs none."""
_BRANCH = tl.constexpr(BRANCH)


def lay_branches(batch: Any, drafted: Any, parents: Tensor, depth: int, num_reqs: int) -> None:
    """Puts branches in the place of drafted trees, where they are deeper; waits for nothing.

    Args:
        batch: A `DraftBatch`: ``branches`` says how long each may be, ``told`` has its tokens.
        drafted: The trees, `DraftedTrees`; a branch has no more nodes than the request's tree had.
        parents: int32 ``[R', W]``, written: the trees' topologies.
        depth: Of the trees.
        num_reqs: R: the first R requests have trees.
    """
    branches_kernel[(num_reqs,)](
        batch.slots, batch.branches, batch.told, batch.told.stride(0), depth, drafted.nodes,
        drafted.rows, drafted.tokens, drafted.tokens.stride(0), parents, parents.stride(0),
        parents.shape[1], NODES=triton.next_power_of_2(parents.shape[1]), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["told_stride", "depth", "tokens_stride", "parents_stride", "width"])
def branches_kernel(
    slots, branch_lengths, told, told_stride, depth, num_nodes, rows, tokens, tokens_stride,
    parents, parents_stride, width, NODES: tl.constexpr,
):  # fmt: skip
    """One request per program. Arguments as in `lay_branches`, ``drafted``'s by request slot."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    if slot >= 0:
        length = tl.minimum(tl.load(branch_lengths + request), tl.load(num_nodes + slot) - 1)
        if length > depth:
            node = tl.arange(0, NODES)
            is_told = (node > 0) & (node <= length)
            token = tl.load(told + request * told_stride + node - 1, mask=is_told)
            tl.store(tokens + request * tokens_stride + node, token, mask=is_told)
            parent = tl.where(is_told, node - 1, -1)
            tl.store(parents + request * parents_stride + node, parent, mask=node < width)
            tl.store(num_nodes + slot, length + 1)
            tl.store(rows + slot, _BRANCH)
