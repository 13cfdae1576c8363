"""vLLM's speculator of a draft as trees need it: the model, its cache, its graphs, its requests.

All that surrounds the passes of a step, which are in `proposer`.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader, set_offloader
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.draft_plan import DraftPlan
from sequoia_vllm.drafting.growth import DraftModel, DraftQueries, DraftStates, TreeGrowth
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.common.draft_schedule import fewer_drafts, most_drafts, scheduled_drafts
from sequoia_vllm.engine.core.grammar import thinks_first
from sequoia_vllm.engine.runner.attention_layers import freed_behind
from sequoia_vllm.engine.runner.draft_failure import survive_draft
from sequoia_vllm.engine.v2.attention.backend import TreeBackend
from sequoia_vllm.engine.v2.drafting.draft_cache import DraftCache
from sequoia_vllm.engine.v2.drafting.draft_graphs import DraftGraphs
from sequoia_vllm.engine.v2.drafting.draft_progress import DraftProgress
from sequoia_vllm.engine.v2.drafting.request_modes import RequestModes
from sequoia_vllm.engine.v2.drafting.tree_memory import (
    allocate_drafted,
    has_soft_cap,
    most_scored,
    take_logits_memory,
)

logger = logging.getLogger("vllm.sequoia")


class TreeSpeculator(DraftModelSpeculator, DraftModel):
    """vLLM's speculator of a draft (loading, KV cache, buffers), and the draft that growth runs.

    Subclasses say how a kind of draft is run. They derive from the speculator of vLLM's that
    loads it, too.

    Attributes:
        state_offset: See `kernels.begin_drafting`.
        most_scored: Rows of logits of the target that a step has at most, warm-up included.
        has_failed: Whether the draft has; then it is not asked again.
        on_trial: Graphs are captured to learn what memory they take, and thrown away.
        untried_bytes: Memory of the graphs that were not captured on trial.
    """

    state_offset: ClassVar[int] = 0
    has_failed = False
    on_trial = False
    untried_bytes = 0
    _serves = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
        tables: TreeTables,
        backend: TreeBackend,
    ) -> None:
        super().__init__(vllm_config, device)
        self.tables = tables
        self.tree = tree = tables.tree
        self.max_drafts = self.tree.num_speculative_tokens  # lowered by measuring tools
        self.req_states = req_states
        self.backend = backend
        self.modes = RequestModes(self.max_num_reqs, thinks_first(vllm_config))
        most = most_drafts(vllm_config)
        self.most_scored = most_scored(most, tree.size, self.max_num_tokens)
        self.plan = DraftPlan(
            tree, scheduled_drafts(vllm_config), self.max_num_tokens, fewer_drafts(vllm_config),
            self._least_rows(), most,
        )  # fmt: skip
        steps_ahead = vllm_config.max_concurrent_batches - 1
        self.progress = self._new_progress(steps_ahead)
        self.batch = DraftBatch(self.max_num_reqs, device, self.state_offset)
        self._logits_size = vllm_config.model_config.get_vocab_size()
        self._read_graphs: DraftGraphs | None = None
        self._growth_graphs: DraftGraphs | None = None

    # -- what kinds of drafts differ in ---------------------------------------------------

    @abstractmethod
    def _new_progress(self, steps_ahead: int) -> DraftProgress:
        """Follows what the draft has read; vLLM schedules so many steps ahead."""

    @abstractmethod
    def _slot_mappings(self) -> Tensor:
        """int64 ``[groups, rows]``: room for the slots of the largest pass."""

    @abstractmethod
    def run_draft(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        recurrent_states: Tensor | None,
    ) -> DraftStates:
        """Runs the draft in vLLM's forward context; see `DraftModel.forward`."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The draft's logits ``[rows, V]`` of the target's tokens."""
        return self.model.compute_logits(hidden)

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.combine_hidden_states`."""
        return target_states

    def _least_rows(self) -> int:
        """Rows that every request has in some pass, however small its tree."""
        return 1

    def _dummy_states(self, rows: int) -> Tensor | None:
        """States for a forward of so many rows that belong to no request; None: it reads none."""
        return None

    def _target_states(self) -> Tensor | None:
        """The buffer of `TreeGrowth` for the target's states; None: the draft reads none."""
        return None

    # -- model and cache ---------------------------------------------------------------

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Loads vLLM's draft, on the device."""
        with nothing_offloaded():
            super().load_model(target_model)
        self._target_is_capped = has_soft_cap(target_model)

    def allocate(self, target_model: torch.nn.Module) -> None:
        """Makes what drafting and verification need on the device besides models.

        The runner calls it when they are loaded: before memory is profiled, and outside of the
        memory of weights (see `SequoiaWorker.load_model`). Tensors of subclasses belong here, too.
        """
        self.drafted = allocate_drafted(
            self.plan, self.tree, self.max_num_reqs, self._logits_size,
            self.draft_model_config.head_dtype, self.device,
        )  # fmt: skip

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's, and lets the draft's growth work on these caches."""
        super().set_attn(*args, **kwargs)
        groups = {
            name: index
            for index, group in enumerate(self.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if name in self.draft_attn_layer_names
        }
        specs = {i: self.kv_cache_config.kv_cache_groups[i].kv_cache_spec for i in groups.values()}
        self.progress.use_cache({index: spec.block_size for index, spec in specs.items()})
        windows = {i: w for i, spec in specs.items() if (w := freed_behind(spec)) is not None}
        if windows and min(windows.values()) <= self.tree.depth + 1:
            raise ValueError(
                f"the draft has a sliding window of {min(windows.values())} tokens, too few for a "
                f"tree of depth {self.tree.depth}: choose a less deep tree"
            )
        self._cache = DraftCache(self.block_tables, groups, windows, self._slot_mappings())
        self._growth = self._new_growth(
            batch=self.batch,
            drafted=self.drafted,
            inputs=self._cache.inputs(self.max_num_reqs),
            token_ids=self.req_states.all_token_ids.gpu,
            max_lens=(self.max_model_len, self.draft_model_config.max_model_len),
            depth=self.tree.depth,
            target_states=self._target_states(),
        )

    def _new_growth(self, **shared: Any) -> TreeGrowth:
        """Makes what grows trees; ``shared`` is all that it gets but the model."""
        return TreeGrowth(**shared, model=self)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        queries: DraftQueries,
        recurrent_states: Tensor | None = None,
    ) -> DraftStates:
        """See `DraftModel.forward`; layers of a cache group share their attention metadata."""
        metadata = self._metadata_of(queries, slots, self._cache.groups)
        by_layer = self._cache.by_layer(slots)
        return self.run_draft(token_ids, positions, metadata, by_layer, recurrent_states)

    def _metadata_of(
        self, queries: DraftQueries, slots: Tensor, groups: dict[str, int]
    ) -> dict[str, Any]:
        """Attention metadata by layer, for layers with these cache groups."""
        tables = self._cache.block_tables.input_block_tables
        num_reqs = len(queries.context_lens)
        by_group = {
            group: self.backend.draft_metadata(queries, tables[group][:num_reqs], slots[group])
            for group in set(groups.values())
        }
        return {name: by_group[group] for name, group in groups.items()}

    # -- graphs ----------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Replaces vLLM's, which captures nothing of standalone draft models."""
        growth_sizes = {drafts: self.plan.graph_sizes(drafts) for drafts in self.plan.drafts}
        self._read_graphs, self._growth_graphs = (
            DraftGraphs(self.vllm_config, self.device, cudagraph_mode, sizes)
            for sizes in (self.plan.read_sizes, growth_sizes)
        )

    def capture_next(self, on_trial: bool) -> None:
        """Says whether graphs are captured on trial next."""
        self.on_trial, self.untried_bytes = on_trial, 0

    def capture(self) -> None:
        """Replaces vLLM's: the reading of a few tokens is one graph, a tree's growth another."""
        captures = list(self._captures())
        if not captures:
            return
        self.batch.slots.fill_(-1)
        free, started = torch.accelerator.get_memory_info()[0], time.perf_counter()
        for graphs, run, title in captures:
            graphs.capture_all(run, title, self.on_trial)
        self.untried_bytes = sum(graphs.untried_bytes for graphs, _, _ in captures)
        if not self.on_trial:
            taken = free - torch.accelerator.get_memory_info()[0]
            logger.info(
                "Sequoia: %d CUDA graphs of the draft took %.1f s and %.2f GiB",
                sum(len(graphs.graphs) for graphs, _, _ in captures),
                time.perf_counter() - started, taken / (1 << 30),
            )  # fmt: skip

    def _captures(self) -> Iterator[tuple[DraftGraphs, Callable[[int, int], None], str]]:
        """Graphs of the draft, see `DraftGraphs.capture_all`."""
        longest = self.max_model_len
        if self._read_graphs is not None and self._growth_graphs is not None:
            yield (
                self._read_graphs,
                lambda requests, width: self._growth.read_committed(requests, width, longest),
                "Capturing what the draft reads",
            )
            yield (
                self._growth_graphs,
                lambda requests, drafts: self._growth.grow(
                    requests, self.tables.levels_of(drafts), longest
                ),
                "Capturing tree growth",
            )

    # -- requests ----------------------------------------------------------------------

    def start_request(self, slot: int, request: NewRequestData) -> None:
        """A new or resumed request takes this slot; `apply_starts` follows."""
        self.progress.start(slot, request.num_computed_tokens, request.block_ids)
        self.modes.start(slot, request.sampling_params)

    def apply_starts(self) -> None:
        """Makes the requests that started known to the device."""
        self.modes.apply_starts()

    def read_truncation_of(self, states: SamplingStates) -> None:
        """Notes where requests' top-k, top-p and min-p are; vLLM passes temperatures and seeds."""
        self._states = states

    # -- failure ---------------------------------------------------------------------------

    def begin_to_serve(self) -> None:
        """Lets the draft fail from now on: requests are users', who can be served without it."""
        self._serves = True

    def _survive(self) -> None:
        """The draft has failed: no request has a tree, and placeholders count for nothing.

        Raises:
            Exception: The draft's, at start-up and on several ranks; or what a device says
                that does nothing more after it.
        """
        if not self._serves:
            raise
        survive_draft(self.vllm_config)
        self.has_failed = True
        self.drafted.nodes.zero_()

    # -- memory profiling ---------------------------------------------------------------

    def _run_dummy(self, batch: InputBatch, is_profile: bool) -> None:
        """The largest forward, and the widest level's logits; to profile memory, the target's."""
        rows = batch.num_tokens
        states = self.run_draft(
            batch.input_ids[:rows], batch.positions[:rows], None, None, self._dummy_states(rows)
        )
        self.compute_logits(states.hidden[: min(rows, self.plan.widest_level)])
        if is_profile:
            take_logits_memory(
                self.most_scored, self.tree.size, self._logits_size,
                self.vllm_config.model_config.head_dtype, self.device,
                capped=self._target_is_capped,
            )  # fmt: skip


@contextmanager
def nothing_offloaded() -> Iterator[None]:
    """Models built in the block are not offloaded; then the engine's offloader is back.

    One offloader serves all models of a process. A draft that comes from host memory, level by
    level, would cost more than it saves. And vLLM's prefetch backend takes the layers of one
    model only.
    """
    offloader = get_offloader()
    set_offloader(NoopOffloader())
    try:
        yield
    finally:
        set_offloader(offloader)
