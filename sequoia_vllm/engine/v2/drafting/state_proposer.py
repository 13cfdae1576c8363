"""What all heads that read the target's hidden states share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from sequoia_vllm.drafting.draft_plan import depths_by_drafts
from sequoia_vllm.engine.v2.drafting.draft_graphs import DraftGraphs
from sequoia_vllm.engine.v2.drafting.draft_progress import DraftProgress
from sequoia_vllm.engine.v2.drafting.proposer import Begin, TreeProposerV2, max_keys
from sequoia_vllm.engine.v2.drafting.ragged_rows import RaggedRows
from sequoia_vllm.graph_batches import powers_of_two
from sequoia_vllm.kernels.target_states import gather_target_states


class StateTreeProposer(TreeProposerV2):
    """Gathers the target's hidden states for a head.

    A step leaves the target's states (of some layers, or the last ones) at all nodes. One
    launch gathers the accepted path's before the head reads. The states do not outlive the step,
    so the head reads in every step, whether it drafts or not. With prefix caching it also reads
    requests that can use no tree: others may share their blocks, and it could never catch up.
    """

    state_offset = 1
    _only_keys = False  # nothing grows from what is read
    _key_graphs: DraftGraphs | None = None

    def _new_progress(self, steps_ahead: int) -> DraftProgress:
        return DraftProgress(self.max_num_reqs, depths_by_drafts(self.tree), self.device)

    def allocate(self, target_model: torch.nn.Module) -> None:
        """See `TreeSpeculator.allocate`; also makes room for the states of the largest graph."""
        super().allocate(target_model)
        width = self._layers_read(target_model) * self.vllm_config.model_config.get_hidden_size()
        rows = max(self.plan.most_rows_read, self.max_num_reqs)
        self._gathered = torch.zeros(rows, width, dtype=self.dtype, device=self.device)
        self._rows_of: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers: list[Tensor] = []

    def _layers_read(self, target_model: torch.nn.Module) -> int:
        """Number of the target's layers whose states the head reads."""
        layers = get_eagle3_aux_layers_from_config(self.speculative_config)
        if layers is None:
            layers = target_model.get_eagle3_default_aux_hidden_state_layers()
        return len(layers)

    def _states_read(self, last: Tensor, auxiliary: list[Tensor] | None) -> list[Tensor]:
        """The step's states ``[T, H]`` that the head reads, by layer."""
        assert auxiliary, "vLLM gives heads the target's auxiliary states"
        return auxiliary

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Allocates the slots, then calls vLLM's."""
        block_tables: BlockTables = kwargs["block_tables"] if "block_tables" in kwargs else args[2]
        self._slots = torch.empty(
            block_tables.num_kv_cache_groups,
            self.max_num_tokens + self.max_num_reqs,
            dtype=torch.int64,
            device=self.device,
        )
        super().set_attn(*args, **kwargs)

    def _slot_mappings(self) -> Tensor:
        return self._slots

    def _target_states(self) -> Tensor:
        return self._gathered

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """Combines the states of several layers into one of the head's width."""
        return self.model.combine_hidden_states(target_states)

    def _run_head(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        **inputs: Any,
    ) -> Any:
        """Runs the head in vLLM's forward context; ``inputs`` are its inputs besides tokens."""
        rows = len(token_ids)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=rows,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=rows),
        ):
            return self.model(
                input_ids=token_ids, positions=positions, inputs_embeds=None, **inputs
            )

    # -- where nothing is drafted ----------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """See `TreeSpeculator`; adds graphs that read one token of each request."""
        super().init_cudagraph_manager(cudagraph_mode)
        sizes = {1: powers_of_two(self.max_num_reqs)}
        self._key_graphs = DraftGraphs(self.vllm_config, self.device, cudagraph_mode, sizes)

    def _captures(self) -> Iterator[tuple[DraftGraphs, Callable[[int, int], None], str]]:
        """See `TreeSpeculator`."""
        yield from super()._captures()
        if self._key_graphs is not None:
            yield (
                self._key_graphs,
                lambda requests, _: self._store_keys(requests, self.max_model_len),
                "Capturing what the draft reads for later",
            )

    def _store_keys(self, num_reqs: int, most_keys: int) -> None:
        with self._reading_for_keys():
            self._growth.store_keys(num_reqs, most_keys)

    def _reads(self, can_draft: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """See `TreeProposerV2._reads`: all, if one that drafts may share their blocks."""
        if self.vllm_config.cache_config.enable_prefix_caching and self.modes.some_draft:
            return np.ones_like(can_draft)
        return can_draft

    def _reads_without_drafting(self, batch: InputBatch, reads: NDArray[np.bool_]) -> bool:
        """True, as this step's states do not outlive it."""
        return True

    def _only_read(self, batch: InputBatch, begin: Begin, reads: NDArray[np.bool_]) -> None:
        """Reads only to fill the KV cache; uses a graph if each request has one token."""
        if self.progress.most_unread(batch.idx_mapping_np[reads]) > 1:
            with self._reading_for_keys():
                super()._only_read(batch, begin, reads)
            return
        begin(self.tables.levels_of(1), batch.num_reqs, 0)
        self._before_reading(batch.num_reqs, 1)
        if not (self._key_graphs and self._key_graphs.replay(batch.num_reqs, 1)):
            self._store_keys(batch.num_reqs, max_keys(batch))

    @contextmanager
    def _reading_for_keys(self) -> Iterator[None]:
        self._only_keys = True
        try:
            yield
        finally:
            self._only_keys = False

    # -- one drafting pass -----------------------------------------------------------------

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        """Proposes like `TreeProposerV2`, then frees the step's states for the next step."""
        try:
            return super().propose(*args, **kwargs)
        finally:
            self._layers = []

    def _take_target_states(
        self, batch: InputBatch, last: Tensor, auxiliary: list[Tensor] | None
    ) -> None:
        self._layers = self._states_read(last, auxiliary)
        self._first_rows = batch.query_start_loc[: batch.num_reqs + 1]

    def _fits_growth(self, num_trees: int, num_reqs: int, width: int) -> bool:
        """True if all requests get trees and their states fit: every request must be read."""
        return num_trees == num_reqs and num_trees * width <= len(self._gathered)

    def _before_reading(self, num_trees: int, width: int) -> None:
        requests, offsets = self._uniform_rows(width)
        rows = num_trees * width
        self._gather(requests[:rows], offsets[:rows], self._gathered[:rows])

    def _ragged_states(self, rows: RaggedRows) -> Tensor:
        states = self._gathered.new_empty(len(rows.requests), self._gathered.shape[1])
        return self.combine_hidden_states(self._gather(rows.requests, rows.offsets, states))

    def _dummy_states(self, rows: int) -> Tensor:
        return self.combine_hidden_states(self._gathered.new_zeros(rows, self._gathered.shape[1]))

    def _gather(self, requests: Tensor, offsets: Tensor, states: Tensor) -> Tensor:
        gather_target_states(
            self._layers,
            query_start_loc=self._first_rows,
            accepted=self.accepted,
            requests=requests,
            offsets=offsets,
            states=states,
        )
        return states

    def _uniform_rows(self, width: int) -> tuple[Tensor, Tensor]:
        """Request and offset of each row, where a pass reads ``width`` tokens per request."""
        if width not in self._rows_of:
            rows = torch.arange(len(self._gathered), dtype=torch.int32, device=self.device)
            # Same dtypes as ragged rows, so that the kernel is compiled once.
            self._rows_of[width] = (rows // width).long(), rows % width
        return self._rows_of[width]
