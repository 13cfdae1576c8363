"""Reads what a step committed into the draft's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from sequoia_vllm.drafting.block_growth import BlockModel
from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.growth import DraftStates, TreeGrowth, chain_width
from sequoia_vllm.drafting.tree_tables import DraftLevels
from sequoia_vllm.engine.v2.drafting.draft_graphs import DraftGraphs
from sequoia_vllm.engine.v2.drafting.draft_progress import DraftProgress
from sequoia_vllm.engine.v2.drafting.drafter import DraftPass, TreeDrafter
from sequoia_vllm.engine.v2.drafting.ragged_rows import RaggedRows
from sequoia_vllm.engine.v2.drafting.target_states import TargetStates

# Rows times context tokens of a pass that reads short prompts: its padding reads contexts, too.
_MOST_READ = 512 * 4096


@dataclass
class CommittedReader:
    """Reads committed tokens: equally many of each request, with a graph, or as many as there are.

    Attributes:
        drafter: Reads.
        growth: Its reading passes, and where it keeps the states of roots.
        progress: What the draft has read.
        states: The target's, for a head; None: the draft reads tokens alone.
        batch: Gives ``starts`` and ``counts`` of the tokens.
        build_metadata: vLLM's ``_build_attn_metadata``.
        buffers: vLLM's, which it reads.
        token_ids: int32 ``[slots, max_model_len]``: tokens of each request.
        most_rows: Most rows of a pass.
        draft_max_len: The draft's longest request.
    """

    drafter: TreeDrafter
    growth: TreeGrowth
    progress: DraftProgress
    states: TargetStates | None
    batch: DraftBatch
    build_metadata: Callable[..., dict[str, Any] | None]
    buffers: InputBuffers
    token_ids: Tensor
    most_rows: int
    draft_max_len: int

    def width(
        self,
        batch: InputBatch,
        reads: NDArray[np.bool_],
        num_trees: int,
        levels: DraftLevels,
        graphs: DraftGraphs | None,
    ) -> int | None:
        """How many rows the draft reads of each request with a tree; a graph's number if one fits.

        None: it reads all requests without a graph. Either one has more unread tokens than a graph
        has rows (a long prompt), or rows of padding would attend to long contexts.
        """
        path = chain_width(levels)
        captured = graphs.tokens_for(num_trees) if graphs else []
        slots = batch.idx_mapping_np
        unread = self.progress.most_unread(slots[:num_trees][reads[:num_trees]])
        if self.progress.most_unread(slots[num_trees:][reads[num_trees:]]) > path:
            return None
        most_rows = _MOST_READ // max_keys(batch)
        fitting = (
            width
            for width in (*captured, path)
            if width >= unread and self._fits_growth(num_trees, batch.num_reqs, width)
            if width <= self.drafter.tree.depth + 1 or num_trees * width <= most_rows
        )
        return next(fitting, None)

    def _fits_growth(self, num_trees: int, num_reqs: int, width: int) -> bool:
        """Whether `TreeGrowth` can read ``width`` tokens of each request that gets a tree."""
        if self.states is None:
            return num_trees * width <= self.most_rows
        # Every request must be read, also without a tree, and the states must have room.
        return num_trees == num_reqs and num_trees * width <= len(self.states.gathered)

    def read(
        self,
        batch: InputBatch,
        bounds: NDArray[np.int32],
        num_trees: int,
        width: int | None,
        graphs: DraftGraphs | None,
    ) -> None:
        """Reads, and keeps the states of the first ``num_trees`` roots; see `width`."""
        if width is None:
            states, last_rows = self.read_ragged(batch, bounds)
            self.growth.keep_roots(states, last_rows[:num_trees])
            return
        if self.states is not None:
            self.states.gather_uniform(num_trees, width)
        if not (graphs and graphs.replay(num_trees, width)):
            self.growth.read_committed(num_trees, width, max_keys(batch))

    def must_read(self, batch: InputBatch, reads: NDArray[np.bool_]) -> bool:
        """Whether the draft must read these requests' tokens although it drafts nothing.

        A model must for prompts if it has sliding windows: see `leave_out_before_windows`.
        """
        if self.states is not None:
            return True
        return bool(self.drafter.cache.windows and (batch.is_prefilling_np & reads).any())

    def only_read(
        self,
        batch: InputBatch,
        begin: Callable[[], NDArray[np.int32]],
        reads: NDArray[np.bool_],
        graphs: DraftGraphs | None,
    ) -> None:
        """Reads these requests' tokens, and nothing grows.

        Args:
            batch: R requests.
            begin: Prepares the pass; returns the most rows of each request, int32 ``[R]``.
            reads: bool ``[R]``.
            graphs: Read one token of each request for its keys alone.
        """
        most = self.progress.most_unread(batch.idx_mapping_np[reads])
        bounds = begin()
        if self.states is not None and most <= 1:
            self.states.gather_uniform(batch.num_reqs, 1)
            if not (graphs and graphs.replay(batch.num_reqs, 1)):
                self.store_keys(batch.num_reqs, max_keys(batch))
        elif bounds.any():
            with self.drafter.reading_for_keys():
                self.read_ragged(batch, bounds)

    def store_keys(self, num_reqs: int, most_keys: int) -> None:
        """Reads one token of each request for its keys and values alone."""
        with self.drafter.reading_for_keys():
            self.growth.store_keys(num_reqs, most_keys)

    def read_ragged(
        self, batch: InputBatch, bounds: NDArray[np.int32]
    ) -> tuple[DraftStates, Tensor]:
        """Reads a different number of tokens of each request, as for prompts.

        Returns:
            States of all rows, and the row of each request's last token, int32 ``[R]``.
        """
        rows = RaggedRows.of(batch, bounds, self.batch, self.drafter.cache)
        states = None if self.states is None else self.states.gather(rows.requests, rows.offsets)
        positions = rows.positions.clamp(max=self.draft_max_len - 1)
        if isinstance(self.drafter, BlockModel):  # no forward: it reads nothing but states
            assert states is not None
            self.drafter.store_context(states, positions, rows.slots)
            return DraftStates(states), rows.last
        token_ids, metadata = self._ragged_inputs(batch, rows)
        by_layer = self.drafter.cache.by_layer(rows.slots)
        ragged = DraftPass(token_ids, positions, states, metadata, by_layer)
        return self.drafter.run(ragged), rows.last

    def _ragged_inputs(
        self, batch: InputBatch, rows: RaggedRows
    ) -> tuple[Tensor, dict[str, Any] | None]:
        """Token ids int32 ``[rows]`` and attention metadata of these rows."""
        num_reqs, total, buffers = batch.num_reqs, len(rows.positions), self.buffers
        buffers.query_start_loc[: num_reqs + 1] = rows.first
        buffers.seq_lens[:num_reqs] = self.batch.starts[:num_reqs] + rows.first.diff()
        buffers.positions[:total] = rows.positions
        metadata = self.build_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.NONE, total, num_reqs),
            query_start_loc_np=rows.most_np,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=int(np.diff(rows.most_np).max()),
            slot_mappings=rows.slots,
        )
        last = self.token_ids.shape[1] - 1
        places = (rows.positions + self.batch.state_offset).clamp(max=last)
        return self.token_ids[batch.idx_mapping[rows.requests], places], metadata


def max_keys(batch: InputBatch) -> int:
    """Upper bound of the committed tokens of any request of this batch."""
    return int(batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs].max()) + 1
