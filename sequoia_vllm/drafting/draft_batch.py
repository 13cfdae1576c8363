"""The buffers that a drafting pass reads: they stay where they are, so CUDA graphs may."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sequoia_vllm.drafting.tree_tables import DraftLevels
from sequoia_vllm.kernels.begin_drafting import REQUESTS_AT_ONCE, begin_drafting_kernel
from sequoia_vllm.kernels.modes import SKIP
from sequoia_vllm.verification.retrieval import WINDOW


class SlotStates(NamedTuple):
    """What drafting knows of every request slot: tensors ``[S]``."""

    computed: Tensor  # int32: tokens in the target's cache
    read: Tensor  # int32, written: tokens that the draft has read
    modes: Tensor  # int32, of `kernels.modes`
    most_nodes: Tensor  # int32: the request has no more nodes than this to verify
    temperature: Tensor  # float32, as vLLM keeps it; so are the next three
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seeds: Tensor  # int64
    drafted_nodes: Tensor
    """int32, written: nodes of each tree to verify, root included; 0 in slots without one, and in
    those of requests that are not in the batch."""
    drafted_rows: Tensor  # int32, written for the batch's requests: their first row of draft logits


class DraftBatch:
    """The requests of a drafting pass, in batch order: tensors ``[max_num_reqs]``.

    Args:
        state_offset: 0 or 1: the draft reads a token at its position less this.
        depth: D: tokens that texts and predictions tell; 0 where neither is looked at.
        window: A request's last tokens that are looked at; 0: predictions alone are.
    """

    def __init__(
        self,
        max_num_reqs: int,
        device: torch.device,
        state_offset: int = 0,
        depth: int = 0,
        window: int = WINDOW,
    ) -> None:
        def buffer(dtype: torch.dtype, value: float = 0, more: int = 0) -> Tensor:
            return torch.full((max_num_reqs + more,), value, dtype=dtype, device=device)

        self.state_offset = state_offset
        self.slots = buffer(torch.int64, -1)  # request slots; -1 beyond the batch
        self.starts = buffer(torch.int32)  # first token that the draft has yet to read
        self.counts = buffer(torch.int32)  # how many it reads in this pass
        # Where each request's rows of this pass start, then the end.
        self.first_rows = buffer(torch.int32, more=1)
        # The row of its last token; one of another request where it reads nothing.
        self.last_rows = buffer(torch.int64)
        self.computed_before = buffer(torch.int32)  # tokens in the target's cache before the step
        self.roots = buffer(torch.int32)  # position of the last committed token
        # Tokens in the draft's cache before it.
        self.contexts = buffer(torch.int32) if state_offset else self.roots
        self.modes = buffer(torch.int32, SKIP)  # of `kernels.modes`; SKIP beyond the batch
        self.temperature = buffer(torch.float32)
        self.top_k = buffer(torch.int32, torch.iinfo(torch.int32).max)
        self.top_p, self.min_p = buffer(torch.float32, 1.0), buffer(torch.float32)
        self.seeds = buffer(torch.int64)
        # ``[max_num_reqs, D]``: what texts and predictions say; -1: nothing.
        self.told = torch.full((max_num_reqs, depth), -1, device=device)
        # int32: tokens of each request's branch, see `kernels.told_branches`; 0: it may have none.
        self.branches = buffer(torch.int32)
        # By request slot: the address of its `kernels.predictions.new_record`; 0: there is none.
        self.predictions = buffer(torch.int64)
        self.window = window
        self._places = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)
        self._multiples: dict[int, Tensor] = {}

    def multiples(self, step: int) -> Tensor:
        """int32 ``[max_num_reqs + 1]``: 0, step, 2 * step, ...: where each request's rows start.

        Made once per step: a graph's first run, before it is captured, does so.
        """
        if step not in self._multiples:
            self._multiples[step] = self._places * step
        return self._multiples[step]

    def begin(
        self,
        batch: Any,
        *,
        num_sampled: Tensor,
        bounds: Tensor,
        states: SlotStates,
        levels: DraftLevels,
        longest: int,
        max_trees: int,
    ) -> None:
        """Takes one batch of R requests, and notes which request slots will have trees.

        It does not wait for the device. `begin_drafting_kernel` says which requests get trees.

        Args:
            batch: vLLM's: int32 or int64 ``[R]``, slot of each, all different; int32 ``[R]``,
                tokens of each in the target's pass, contexts included; int32 ``[R + 1]``, first
                row of each in that pass, then the end.
            num_sampled: int32 ``[R]``: tokens that the step sampled; the last of them is
                committed, but not in the target's cache.
            bounds: int32 ``[R]``: most tokens to read.
            states: Of all request slots.
            levels: The trees.
            longest: No tree where the root's position reaches it.
            max_trees: Only the first so many requests get trees.
        """
        requests = batch.idx_mapping
        states.drafted_nodes.zero_()
        begin_drafting_kernel[(1,)](
            requests, states.computed, num_sampled, bounds, batch.seq_lens, batch.query_start_loc,
            states.modes, states.most_nodes, states.temperature, states.top_k, states.top_p,
            states.min_p, states.seeds, states.read, states.drafted_nodes, states.drafted_rows,
            len(requests), len(self.slots), levels.tree.size, levels.rows_per_tree, longest,
            max_trees, self.state_offset, self.slots, self.starts, self.counts, self.first_rows,
            self.last_rows, self.computed_before, self.roots, self.contexts, self.modes,
            self.temperature, self.top_k, self.top_p, self.min_p, self.seeds,
            BLOCK=REQUESTS_AT_ONCE, num_warps=8,
        )  # fmt: skip
