"""Adapts vLLM's speculator to trees: the draft's model, KV cache, graphs and requests.

The passes of a step are in `proposer`.
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
from sequoia_vllm.drafting.tree_tables import TreeShapes
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

    Subclasses define how a kind of draft runs. They also derive from vLLM's speculator that
    loads it.

    Attributes:
        state_offset: See `kernels.begin_drafting`.
        longest: The most committed tokens with which a request gets a tree.
        most_scored: The most rows of the target's logits in a step, warm-up included.
        has_failed: True once the draft has failed; then it does not run again.
        on_trial: True while graphs are captured only to learn their memory, then dropped.
        untried_bytes: Estimated memory of the graphs that were not captured on trial.
    """

    state_offset: ClassVar[int] = 0
    has_failed = False
    on_trial = False
    untried_bytes = 0
    _serves = False
    _has_trees = False  # some request may have one, for the next step

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
        tables: TreeShapes,
        backend: TreeBackend,
    ) -> None:
        super().__init__(vllm_config, device)
        self.tables = tables
        self.tree = tree = tables.tree
        self.max_drafts = self.tree.num_speculative_tokens  # lowered by measuring tools
        self.req_states = req_states
        self.backend = backend
        self.longest = min(self.draft_model_config.max_model_len, self.max_model_len) - 1
        self.modes = RequestModes(self.max_num_reqs, thinks_first(vllm_config), self.longest)
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
        """Makes the `DraftProgress`; vLLM schedules ``steps_ahead`` steps before outcomes."""

    @abstractmethod
    def _slot_mappings(self) -> Tensor:
        """Buffer for the slots of the largest pass, int64 ``[groups, rows]``."""

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
        """The draft's logits ``[rows, V]`` over the target's vocabulary."""
        return self.model.compute_logits(hidden)

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.combine_hidden_states`."""
        return target_states

    def _least_rows(self) -> int:
        """Least rows of a request in its widest pass, however small its tree."""
        return 1

    def _dummy_states(self, rows: int) -> Tensor | None:
        """States for a dummy forward of so many rows; None: the draft reads none."""
        return None

    def _target_states(self) -> Tensor | None:
        """`TreeGrowth`'s buffer for the target's states; None: the draft reads none."""
        return None

    # -- model and cache ---------------------------------------------------------------

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Loads vLLM's draft onto the device, without offloading."""
        with nothing_offloaded():
            super().load_model(target_model)
        self._target_is_capped = has_soft_cap(target_model)

    def allocate(self, target_model: torch.nn.Module) -> None:
        """Allocates what drafting and verification need on the device besides models.

        The runner calls it after loading, before memory profiling, and outside the memory pool of
        weights (see `SequoiaWorker.load_model`). Subclasses allocate their tensors here, too.
        """
        self.drafted = allocate_drafted(
            self.plan, self.tree, self.max_num_reqs, self._logits_size,
            self.draft_model_config.head_dtype, self.device,
        )  # fmt: skip

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's, and prepares growth on these caches.

        Raises:
            ValueError: The draft's sliding window is too short for the tree.
        """
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
                f"tree of depth {self.tree.depth}: choose a shallower tree"
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
        """Makes the `TreeGrowth`; ``shared`` has all arguments except the model."""
        return TreeGrowth(**shared, model=self)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        queries: DraftQueries,
        recurrent_states: Tensor | None = None,
    ) -> DraftStates:
        """See `DraftModel.forward`."""
        metadata = self._metadata_of(queries, slots, self._cache.groups)
        by_layer = self._cache.by_layer(slots)
        return self.run_draft(token_ids, positions, metadata, by_layer, recurrent_states)

    def _metadata_of(
        self, queries: DraftQueries, slots: Tensor, groups: dict[str, int]
    ) -> dict[str, Any]:
        """Attention metadata by layer; layers of one cache group share theirs."""
        tables = self._cache.block_tables.input_block_tables
        num_reqs = len(queries.context_lens)
        by_group = {
            group: self.backend.draft_metadata(queries, tables[group][:num_reqs], slots[group])
            for group in set(groups.values())
        }
        return {name: by_group[group] for name, group in groups.items()}

    # -- graphs ----------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Replaces vLLM's, which captures no graphs of standalone draft models."""
        growth_sizes = {drafts: self.plan.graph_sizes(drafts) for drafts in self.plan.drafts}
        # With a sliding window prompts need `leave_out_before_windows`, which no graph has.
        widest = self.tree.depth + 1 if self._cache.windows else self.max_num_tokens
        read_sizes = {w: sizes for w, sizes in self.plan.read_sizes.items() if w <= widest}
        self._read_graphs, self._growth_graphs = (
            DraftGraphs(self.vllm_config, self.device, cudagraph_mode, sizes)
            for sizes in (read_sizes, growth_sizes)
        )

    def capture_next(self, on_trial: bool) -> None:
        """Sets whether the next capture is a trial."""
        self.on_trial, self.untried_bytes = on_trial, 0

    def capture(self) -> None:
        """Replaces vLLM's: captures passes that read, and passes that grow trees."""
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
        """Yields the draft's graphs with the arguments of `DraftGraphs.capture_all`."""
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
        """Notes a new or resumed request in this slot; `apply_starts` follows."""
        self.progress.start(slot, request.num_computed_tokens, request.block_ids)
        prompt = request.prompt_token_ids or request.prefill_token_ids or []
        self.modes.start(slot, request.sampling_params, len(prompt))

    def apply_starts(self) -> None:
        """Copies the started requests' modes to the device."""
        self.modes.apply_starts()

    def read_truncation_of(self, states: SamplingStates) -> None:
        """Notes where requests' top-k, top-p and min-p are; vLLM passes only temperature, seed."""
        self._states = states

    # -- failure ---------------------------------------------------------------------------

    def begin_to_serve(self) -> None:
        """From now on the engine serves users, and survives a draft that fails."""
        self._serves = True

    def _survive(self) -> None:
        """Handles the draft's failure: no request has a tree from now on.

        Raises:
            Exception: The draft's, where the engine cannot go on: at start-up, on several
                ranks, or after errors that leave the device unusable.
        """
        if not self._serves:
            raise
        survive_draft(self.vllm_config)
        self.has_failed = True
        self.drafted.nodes.zero_()

    def _drop_trees(self) -> None:
        """Leaves no request a tree: steps that are scheduled already must not find an old one."""
        if self._has_trees:
            self.drafted.nodes.zero_()
            self._has_trees = False

    # -- memory profiling ---------------------------------------------------------------

    def _run_dummy(self, batch: InputBatch, is_profile: bool) -> None:
        """Runs the largest forward; for memory profiling also takes the target's logits."""
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
    """Keeps models built in the block on the device; then restores the engine's offloader.

    One offloader serves all models of a process. Reading the draft from host memory at every
    level would cost more than it saves. Also, vLLM's prefetch backend takes only one model's
    layers.
    """
    offloader = get_offloader()
    set_offloader(NoopOffloader())
    try:
        yield
    finally:
        set_offloader(offloader)
