"""Steps that read prompts beside trees, as full CUDA graphs: our kernel attends to all rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.growth import NodeQueries
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.runner.attention_layers import window_of
from sequoia_vllm.engine.v2.attention.attention_gpu import GPUTreeForward
from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend
from sequoia_vllm.engine.v2.attention.scoring import shared_metadata
from sequoia_vllm.hardware.graph_sizes import MIXED_TOKENS
from sequoia_vllm.kernels.segments import TREE, cut_rows, most_segments, with_chain


class MixedSteps:
    """Where a captured forward finds the segments of any step: see `sequoia_vllm.kernels.segments`.

    All of a segment but its rows is in buffers that stay in place. `place` writes them before a
    replay, and waits for nothing on the device.

    Args:
        tables: The engine's tree, or each slot's.
        impls: The target's attention.
        max_num_reqs: Requests of the largest step.
    """

    def __init__(
        self,
        backend: GPUTreeBackend,
        tables: TreeTables,
        impls: Iterable[GPUTreeForward],
        max_num_reqs: int,
    ) -> None:
        self._backend = backend
        self._mask, self._ancestors = tables.mask, tables.ancestors
        if self._mask is None:
            self._ancestors = with_chain(tables.ancestors)
            for impl in impls:  # here, not in a step: making a mask waits for the device
                backend.masks.of(self._ancestors, window_of(impl))
        self._chain, self._width = len(self._ancestors) - 1, self._ancestors.shape[-1]
        most = most_segments(max_num_reqs, MIXED_TOKENS, self._width)
        device = tables.ancestors.device
        # Of each segment its request and its mask's slot; then, in 32 bits, the first rows and the
        # end. One copy brings all of it.
        self._placed = torch.zeros(2 * most + most // 2 + 1, dtype=torch.int64, device=device)
        self._requests, self._slots = self._placed[: 2 * most].view(2, most)
        self._starts = self._placed[2 * most :].view(torch.int32)[: most + 1]
        self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables: list[Tensor] = []

    def prepare_capture(
        self, batch: InputBatch, metadata: dict[str, Any], layers: list[str], max_keys: int
    ) -> None:
        """Gives a graph's attention as many segments as any batch of its size may have."""
        groups = shared_metadata(metadata, layers)
        self._make_tables([group.block_table for group in groups])
        self.place(batch, metadata, layers)
        segments = most_segments(batch.num_reqs, batch.num_tokens, self._width)
        nodes = NodeQueries(
            request_slots=self._slots[:segments],
            context_lens=self._context_lens[:segments],
            query_start_loc=self._starts[: segments + 1],
            first=0,
            width=self._width,
            ancestors=self._ancestors,
            mask=self._mask,
            max_keys=max_keys,
            uneven=True,
        )
        for group, table in zip(groups, self._tables, strict=True):
            group.tree = self._backend.queries(nodes, table[:segments])

    def place(self, batch: InputBatch, metadata: dict[str, Any], layers: list[str]) -> None:
        """Writes a batch's segments, after `TreeScoring.place`; those behind them have no rows."""
        drafts = batch.num_draft_tokens_per_req
        has_tree = np.zeros(batch.num_reqs, dtype=bool) if drafts is None else drafts > 0
        requests, starts = cut_rows(batch.num_scheduled_tokens, has_tree, self._width)
        live = len(requests)
        most, placed = len(self._slots), np.zeros(len(self._placed), dtype=np.int64)
        trees = TREE if self._mask is None else batch.idx_mapping_np
        placed[:live] = requests
        placed[most : most + live] = np.where(has_tree, trees, self._chain)[requests]
        rows = placed[2 * most :].view(np.int32)
        rows[:live], rows[live:] = starts, batch.num_tokens
        async_tensor_h2d(placed, out=self._placed)
        # The first row's position: depth moves no root, and no row of a chain.
        first = torch.index_select(batch.positions, 0, self._starts[:live])
        self._context_lens[:live] = first
        groups = shared_metadata(metadata, layers)
        for group, table in zip(groups, self._tables, strict=True):
            torch.index_select(group.block_table, 0, self._requests[:live], out=table[:live])

    def _make_tables(self, block_tables: list[Tensor]) -> None:
        """One for each cache group; vLLM has others once the trial of its graphs is over."""
        shapes = [(len(self._slots), table.shape[1]) for table in block_tables]
        if [tuple(table.shape) for table in self._tables] != shapes:
            device = self._slots.device
            self._tables = [torch.zeros(s, dtype=torch.int32, device=device) for s in shapes]
