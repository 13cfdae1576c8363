"""The proposer on Model Runner V2: reads committed tokens, and grows every request's tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.growth import DraftStates, chain_width
from sequoia_vllm.drafting.tree_tables import DraftLevels
from sequoia_vllm.engine.v2.drafting.ragged_rows import RaggedRows
from sequoia_vllm.engine.v2.drafting.tree_speculator import TreeSpeculator

# Rows times context tokens of a pass that reads short prompts: its padding reads contexts, too.
_MOST_READ = 512 * 4096

BeginAny = Callable[[NDArray[np.bool_], DraftLevels, int, int], NDArray[np.int32]]
"""`TreeProposerV2._begin`, bound to one step."""
Begin = Callable[[DraftLevels, int, int], NDArray[np.int32]]
"""The same, bound to the requests that the draft reads, too."""


class TreeProposerV2(TreeSpeculator):
    """The speculator's work in a step: its `propose` replaces vLLM's.

    A step's outcome stays on the device. Subclasses also define what a kind of draft reads
    besides tokens.
    """

    accepted: Tensor | None = None
    _last_grown: DraftLevels | None = None
    _last_width: int | None = None

    # -- what drafts read besides tokens: here nothing --------------------------------------

    @abstractmethod
    def _reads_without_drafting(self, batch: InputBatch, reads: NDArray[np.bool_]) -> bool:
        """Whether the draft must read these requests' tokens although it drafts nothing."""

    def _reads(self, can_draft: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which requests the draft reads, bool ``[R]``, given those that can use a tree."""
        return can_draft

    def _take_target_states(
        self, batch: InputBatch, last: Tensor, auxiliary: list[Tensor] | None
    ) -> None:
        """Notes the target's states ``[T, H]`` of this step: the last and the auxiliary ones."""

    def _ragged_states(self, rows: RaggedRows) -> Tensor | None:
        """States that these rows read besides tokens; None: no states."""
        return None

    def _fits_growth(self, num_trees: int, num_reqs: int, width: int) -> bool:
        """Whether `TreeGrowth` can read ``width`` tokens of each request that gets a tree."""
        return num_trees * width <= self.max_num_tokens

    def _before_reading(self, num_trees: int, width: int) -> None:
        """Prepares what `TreeGrowth` reads besides `DraftBatch`."""

    # -- one drafting pass ---------------------------------------------------------------

    def note_accepted(self, accepted: Tensor | None) -> None:
        """Notes the step's accepted nodes, before `propose`.

        Args:
            accepted: int32 ``[R', D]``: nodes by depth, then -1, of the first R' requests of the
                batch, which have trees; None: no request has.
        """
        self.accepted = accepted

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Replaces vLLM's: the draft reads the committed tokens and grows trees.

        Returns:
            Draft tokens int64 ``[R, N]`` in stored tree order. Beyond a request's nodes
            (`drafted.nodes`) they have no meaning.
        """
        self._take_target_states(input_batch, last_hidden_states, aux_hidden_states)
        if dummy_run:  # the first one comes before caches exist
            self._run_dummy(input_batch, is_profile)
            return self.draft_tokens[: input_batch.num_reqs]
        self._last_grown = None
        drafts = min(self.num_speculative_steps, self.max_drafts)
        if num_speculative_tokens is not None:
            drafts = min(drafts, num_speculative_tokens)
        if not self.has_failed:
            try:
                begin = partial(self._begin, input_batch, num_sampled, temperature, seeds)
                self._advance(input_batch, begin, drafts)
            except Exception:
                self._last_grown = None
                self._survive()
        if self.has_failed:
            drafts = 0
        tokens = self.drafted.tokens[: input_batch.num_reqs, 1:]
        if num_speculative_tokens == 0:
            return torch.empty_like(tokens)
        # vLLM overwrites unrequested drafts with -1, in place. Our rows must keep ids that the
        # target can embed: it scores them even where a request later gets no tree.
        return tokens.clone() if drafts < self.num_speculative_steps else tokens

    def _advance(self, batch: InputBatch, begin_any: BeginAny, drafts: int) -> None:
        """Reads the step's committed tokens if the draft must, and grows the trees."""
        self.progress.gain(
            batch.idx_mapping_np,
            batch.num_computed_tokens_np,
            batch.num_scheduled_tokens,
            batch.num_draft_tokens_per_req,
            batch.is_prefilling_np,
        )
        slots = batch.idx_mapping_np
        can_draft = self.modes.can_draft(slots, self.progress.committed_at_least(slots))
        reads = self._reads(can_draft)
        begin = partial(begin_any, reads)
        if drafts > 0 and can_draft.any():
            self._draft(batch, begin, reads, drafts)
        elif reads.any() and self._reads_without_drafting(batch, reads):
            self._only_read(batch, begin, reads)
        else:
            self._drop_trees()

    def _draft(
        self, batch: InputBatch, begin: Begin, reads: NDArray[np.bool_], drafts: int
    ) -> None:
        num_reqs, levels = batch.num_reqs, self.tables.levels_of(drafts)
        num_trees = min(num_reqs, self.plan.most_requests(drafts))
        width = self._width_read(batch, reads, num_trees, levels)
        readers = num_reqs if width is None else num_trees
        bounds = begin(levels, readers, num_trees)
        self._has_trees = True
        self._last_grown, self._last_width = levels, width
        self._read(batch, bounds, num_trees, width)
        if not (self._growth_graphs and self._growth_graphs.replay(num_trees, drafts)):
            self._growth.grow(num_trees, levels, max_keys(batch))

    def _width_read(
        self, batch: InputBatch, reads: NDArray[np.bool_], num_trees: int, levels: DraftLevels
    ) -> int | None:
        """How many rows the draft reads of each request with a tree; a graph's number if one fits.

        None: it reads all requests without a graph. Either one has more unread tokens than a graph
        has rows (a long prompt), or rows of padding would attend to long contexts.
        """
        path = chain_width(levels)
        captured = self._read_graphs.tokens_for(num_trees) if self._read_graphs else []
        slots = batch.idx_mapping_np
        unread = self.progress.most_unread(slots[:num_trees][reads[:num_trees]])
        if self.progress.most_unread(slots[num_trees:][reads[num_trees:]]) > path:
            return None
        most_rows = _MOST_READ // max_keys(batch)
        fitting = (
            width
            for width in (*captured, path)
            if width >= unread and self._fits_growth(num_trees, batch.num_reqs, width)
            if width <= self.tree.depth + 1 or num_trees * width <= most_rows
        )
        return next(fitting, None)

    def _only_read(self, batch: InputBatch, begin: Begin, reads: NDArray[np.bool_]) -> None:
        """Reads the requests' unread tokens, and grows nothing."""
        bounds = begin(self.tables.levels_of(1), batch.num_reqs, 0)
        if bounds.any():
            self._read_ragged(batch, bounds)

    def _read(
        self, batch: InputBatch, bounds: NDArray[np.int32], num_trees: int, width: int | None
    ) -> None:
        """Reads, and keeps the states of the first ``num_trees`` roots; see `_width_read`."""
        if width is None:
            states, last_rows = self._read_ragged(batch, bounds)
            self._growth.keep_roots(states, last_rows[:num_trees])
            return
        self._before_reading(num_trees, width)
        if not (self._read_graphs and self._read_graphs.replay(num_trees, width)):
            self._growth.read_committed(num_trees, width, max_keys(batch))

    def _begin(
        self,
        batch: InputBatch,
        num_sampled: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        reads: NDArray[np.bool_],
        levels: DraftLevels,
        readers: int,
        num_trees: int,
    ) -> NDArray[np.int32]:
        """Prepares the pass; returns the most rows of each request, int32 ``[R]``.

        Of the first ``readers`` requests those that the draft reads are read, and the first
        ``num_trees`` get trees.
        """
        bounds = np.zeros(batch.num_reqs, dtype=np.int32)
        bounds[:readers] = self.progress.take_bounds(
            batch.idx_mapping_np[:readers], reads[:readers], self.max_num_tokens
        )
        self.batch.begin(
            requests=batch.idx_mapping,
            computed=self.req_states.num_computed_tokens.gpu,
            num_sampled=num_sampled,
            bounds=async_tensor_h2d(bounds, device=self.device),
            read=self.progress.read,
            modes=self.modes.gpu,
            most_nodes=self.modes.most_nodes,
            temperature=temperature,
            top_k=self._states.top_k.gpu,
            top_p=self._states.top_p.gpu,
            min_p=self._states.min_p.gpu,
            seeds=seeds,
            drafted_nodes=self.drafted.nodes,
            drafted_rows=self.drafted.rows,
            levels=levels,
            longest=self.longest,
            max_trees=num_trees,
        )
        return bounds

    def _read_ragged(
        self, batch: InputBatch, bounds: NDArray[np.int32]
    ) -> tuple[DraftStates, Tensor]:
        """Reads a different number of tokens of each request, as for prompts.

        Returns:
            States of all rows, and the row of each request's last token, int32 ``[R]``.
        """
        rows = RaggedRows.of(batch, bounds, self.batch, self._cache)
        return self._forward_ragged(batch, rows), rows.last

    def _forward_ragged(self, batch: InputBatch, rows: RaggedRows) -> DraftStates:
        """Runs the draft over these rows."""
        total, positions = len(rows.positions), rows.positions
        buffers = self.input_buffers
        buffers.query_start_loc[: batch.num_reqs + 1] = rows.first
        buffers.seq_lens[: batch.num_reqs] = self.batch.starts[: batch.num_reqs] + rows.first.diff()
        buffers.positions[:total] = positions
        metadata = self._build_attn_metadata(
            num_reqs=batch.num_reqs,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.NONE, total, batch.num_reqs),
            query_start_loc_np=rows.most_np,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=int(np.diff(rows.most_np).max()),
            slot_mappings=rows.slots,
        )
        last = self.req_states.all_token_ids.gpu.shape[1] - 1
        return self.run_draft(
            self.req_states.all_token_ids.gpu[
                batch.idx_mapping[rows.requests], (positions + self.state_offset).clamp(max=last)
            ],
            positions.clamp(max=self.draft_model_config.max_model_len - 1),
            metadata,
            self._cache.by_layer(rows.slots),
            self._ragged_states(rows),
        )

    @property
    def pass_widths(self) -> list[int]:
        """Rows per request of each forward of the last pass, for measuring; empty: no pass."""
        if self._last_grown is None:
            return []
        deeper = self._last_grown.levels[1:]
        width = self._last_width or chain_width(self._last_grown)
        return [width, *(level.width for level in deeper)]


def max_keys(batch: InputBatch) -> int:
    """Upper bound of the committed tokens of any request of this batch."""
    return int(batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs].max()) + 1
