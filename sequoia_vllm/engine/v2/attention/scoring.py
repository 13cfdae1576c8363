"""Prepares the target's pass on Model Runner V2: tree nodes' positions, and the keys they see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.tree_tables import TreeShapes
from sequoia_vllm.kernels.scoring_inputs import place_nodes, shift_nodes


@dataclass(frozen=True)
class OtherRows:
    """Rows of prompts and of requests that decode without drafts; they follow all trees' rows.

    Attributes:
        first: The first such row.
        max_rows: The most such rows of any request.
        max_keys: Upper bound of the tokens of any such request.
    """

    first: int
    max_rows: int
    max_keys: int


@dataclass(frozen=True)
class ScoringTreesV2:
    """The trees of a batch; vLLM sorts their requests first.

    `TreeScoring` makes it before the target's forward. The backend makes the attention's queries
    from it, and reads it again to commit the accepted paths.

    Attributes:
        num_requests: Requests with trees, R.
        max_nodes: Nodes of the largest tree, root included.
        query_start_loc: int32 ``[R + 1]``: first row of each request's nodes, then the end.
        context_lens: int32 ``[R]``: committed tokens before each root.
        slots: int64 ``[R]``: request slot of each.
        max_keys: Upper bound of the tokens of any request, nodes included.
        others: The rows that are not tree nodes; None: there are none.
    """

    num_requests: int
    max_nodes: int
    query_start_loc: Tensor
    context_lens: Tensor
    slots: Tensor
    max_keys: int
    others: OtherRows | None = None

    @property
    def only_trees(self) -> bool:
        """True if every row of the batch is a tree node."""
        return self.others is None


class TreeScoring:
    """Turns vLLM's layout of drafts as chains into trees.

    Before the target's forward the runner calls `place`, which writes the positions and the
    contexts that the forward reads. Then it calls `trees_of` for the attention metadata, or
    `trees_to_capture` while vLLM captures CUDA graphs.

    vLLM computes slots from consecutive positions, and they stay so. Node i has slot c + i and
    RoPE position c + depth(i), where c is the context's length.
    """

    def __init__(self, shapes: TreeShapes, max_num_reqs: int, device: torch.device) -> None:
        self._shapes = shapes
        self.context_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.slots = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)

    def place(self, batch: InputBatch) -> None:
        """Gives tree nodes the position of their depth, and notes their contexts' lengths.

        It writes in place, on the device, to buffers that CUDA graphs read.
        """
        if batch.num_draft_tokens == 0:
            return
        place_nodes(
            rows=batch.logits_indices,
            cu_rows=batch.cu_num_logits,
            shifts=self._shapes.shifts,
            positions=batch.positions,
            context_lens=self.context_lens,
            slots=batch.idx_mapping,
            noted_slots=self.slots,
        )

    def place_on_axes(self, batch: InputBatch, positions: Tensor) -> None:
        """`place` for the positions of M-RoPE, int64 ``[axes, tokens]``."""
        if batch.num_draft_tokens > 0:
            shift_nodes(
                rows=batch.logits_indices,
                cu_rows=batch.cu_num_logits,
                shifts=self._shapes.shifts,
                positions=positions,
                slots=batch.idx_mapping,
            )

    def trees_of(self, batch: InputBatch) -> ScoringTreesV2 | None:
        """The trees of a batch after `place`; None: it has none."""
        drafts = batch.num_draft_tokens_per_req
        if batch.num_draft_tokens == 0 or drafts is None:
            return None
        num_requests = int((drafts > 0).sum())
        lengths = batch.seq_lens_cpu_upper_bound.numpy()
        others = None
        if num_requests < batch.num_reqs:
            others = OtherRows(
                first=int(batch.query_start_loc_np[num_requests]),
                max_rows=int(batch.num_scheduled_tokens[num_requests:].max()),
                max_keys=int(lengths[num_requests:].max()),
            )
        return ScoringTreesV2(
            num_requests=num_requests,
            max_nodes=int(drafts.max()) + 1,
            query_start_loc=batch.query_start_loc[: num_requests + 1],
            context_lens=self.context_lens[:num_requests],
            slots=self.slots[:num_requests],
            max_keys=int(lengths[:num_requests].max()),
            others=others,
        )

    def trees_to_capture(self, batch: InputBatch, nodes: int, max_keys: int) -> ScoringTreesV2:
        """The trees of a CUDA graph for a batch of ``nodes`` tokens per request.

        A replay has equally many requests, some perhaps without tokens.
        """
        return ScoringTreesV2(
            num_requests=batch.num_reqs,
            max_nodes=nodes,
            query_start_loc=batch.query_start_loc[: batch.num_reqs + 1],
            context_lens=self.context_lens[: batch.num_reqs],
            slots=self.slots[: batch.num_reqs],
            max_keys=max_keys,
        )
