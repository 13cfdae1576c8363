"""The buffers that a drafting pass reads: they stay where they are, so CUDA graphs may."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_vllm.drafting.tree_tables import DraftLevels
from sequoia_vllm.kernels.begin_drafting import begin_drafting
from sequoia_vllm.kernels.modes import SKIP


class DraftBatch:
    """The requests of a drafting pass, in batch order.

    Attributes:
        slots: int64 ``[max_num_reqs]``: request slot; -1 beyond the batch.
        starts: int32: first token that the draft has yet to read.
        counts: int32: how many it reads in this pass.
        roots: int32: position of the last committed token.
        contexts: int32: tokens in the draft's cache before it.
        modes: int32: see `kernels.modes`; SKIP beyond the batch.
        temperature: float32.
        top_k, top_p, min_p: int32, float32, float32.
        seeds: int64.
        state_offset: See `kernels.begin_drafting`.

    Args:
        max_num_reqs: Rows.
        device: Where they are.
        state_offset: Of the draft.
    """

    def __init__(self, max_num_reqs: int, device: torch.device, state_offset: int = 0) -> None:
        def buffer(dtype: torch.dtype, value: float = 0) -> Tensor:
            return torch.full((max_num_reqs,), value, dtype=dtype, device=device)

        self.slots = buffer(torch.int64, -1)
        self.state_offset = state_offset
        self.starts, self.counts, self.roots = (buffer(torch.int32) for _ in range(3))
        self.contexts = buffer(torch.int32) if state_offset else self.roots
        self.modes = buffer(torch.int32, SKIP)
        self.temperature = buffer(torch.float32)
        self.top_k = buffer(torch.int32, torch.iinfo(torch.int32).max)
        self.top_p = buffer(torch.float32, 1.0)
        self.min_p = buffer(torch.float32)
        self.seeds = buffer(torch.int64)
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
        *,
        requests: Tensor,
        computed: Tensor,
        num_sampled: Tensor,
        bounds: Tensor,
        read: Tensor,
        modes: Tensor,
        most_nodes: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        drafted_nodes: Tensor,
        drafted_rows: Tensor,
        levels: DraftLevels,
        longest: int,
        max_trees: int,
    ) -> None:
        """Takes one batch, and notes which request slots will have trees.

        Arguments are those of `kernels.begin_drafting`: R requests of the batch, and
        tables of all request slots.

        Args:
            requests, num_sampled, bounds: int32 ``[R]``.
            computed, read, modes, most_nodes, drafted_nodes, drafted_rows: int32
                ``[slots]``; ``read`` and the last two are written.
            temperature, seeds: float32 and int64 ``[slots]``.
            top_k, top_p, min_p: int32, float32 and float32 ``[slots]``, as vLLM keeps them.
            levels: The trees.
            longest, max_trees: What they may be.
        """
        begin_drafting(
            requests=requests,
            computed=computed,
            num_sampled=num_sampled,
            bounds=bounds,
            all_modes=modes,
            most_nodes=most_nodes,
            all_temperatures=temperature,
            all_top_k=top_k,
            all_top_p=top_p,
            all_min_p=min_p,
            all_seeds=seeds,
            read=read,
            num_nodes=drafted_nodes,
            rows=drafted_rows,
            tree_size=levels.tree.size,
            rows_per_tree=levels.rows_per_tree,
            longest=longest,
            max_trees=max_trees,
            lag=self.state_offset,
            slots=self.slots,
            starts=self.starts,
            counts=self.counts,
            roots=self.roots,
            contexts=self.contexts,
            modes=self.modes,
            temperatures=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
        )
