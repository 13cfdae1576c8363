"""The proposer on Model Runner V2: reads what was committed, and grows every request's tree."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.draft_plan import DraftPlan
from sequoia_vllm.drafting.growth import DraftStates, TreeGrowth, chain_width
from sequoia_vllm.drafting.tree_tables import DraftLevels, TreeTables
from sequoia_vllm.engine.attention_layers import freed_behind
from sequoia_vllm.engine.draft_failure import survive_draft
from sequoia_vllm.engine.grammar import thinks_first
from sequoia_vllm.engine.load import fewer_drafts, scheduled_drafts
from sequoia_vllm.engine.v2.backend import TreeBackend
from sequoia_vllm.engine.v2.draft_graphs import DraftGraphs
from sequoia_vllm.engine.v2.draft_loading import nothing_offloaded
from sequoia_vllm.engine.v2.draft_model import CachedDraftModel, DraftCache
from sequoia_vllm.engine.v2.ragged_rows import RaggedRows
from sequoia_vllm.engine.v2.request_modes import RequestModes
from sequoia_vllm.engine.v2.request_reading import RequestReading
from sequoia_vllm.engine.v2.tree_memory import allocate_drafted, most_scored, take_logits_memory


class TreeProposer(DraftModelSpeculator):
    """vLLM's speculator of a draft (loading, KV cache, buffers) growing trees.

    Its `propose` is replaced. Whatever a step decided stays on the device. Subclasses say how
    a kind of draft is run, and what it reads besides tokens: those of vLLM's speculators that
    they derive from load it.

    Attributes:
        lag: See `kernels.begin_drafting`.
        has_failed: Whether the draft has; then it is not asked again.
    """

    lag: ClassVar[int] = 0
    has_failed = False
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
        drafts, fewer = scheduled_drafts(vllm_config), fewer_drafts(vllm_config)
        self.plan = DraftPlan(tree, drafts, self.max_num_tokens, fewer, self._least_rows())
        steps_ahead = vllm_config.max_concurrent_batches - 1
        self.reading = self._new_reading(steps_ahead)
        self.batch = DraftBatch(self.max_num_reqs, device, self.lag)
        self.accepted: Tensor | None = None  # of the step, by `note_accepted`
        self._logits_size = vllm_config.model_config.get_vocab_size()
        self._graphs: DraftGraphs | None = None
        self._last_grown: DraftLevels | None = None

    # -- what kinds of drafts differ in ---------------------------------------------------

    @abstractmethod
    def _new_reading(self, steps_ahead: int) -> RequestReading:
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
        feedback: Tensor | None,
    ) -> DraftStates:
        """Runs the draft in vLLM's forward context; see `DraftModel.forward`."""

    @abstractmethod
    def _reads_without_drafting(self, batch: InputBatch) -> bool:
        """Whether what this step committed must be read although nothing is drafted."""

    def _least_rows(self) -> int:
        """Rows that every request has in some pass, however small its tree."""
        return 1

    # -- what drafts read besides tokens: here nothing --------------------------------------

    def _take_target_states(
        self, batch: InputBatch, last: Tensor, auxiliary: list[Tensor] | None
    ) -> None:
        """Notes the target's states ``[T, H]`` of this step: the last ones, and others."""

    def _dummy_feedback(self, rows: int) -> Tensor | None:
        """What a forward of so many rows reads, of no request."""
        return None

    def _ragged_feedback(self, rows: RaggedRows) -> Tensor | None:
        """What these rows read."""
        return None

    def _target_states(self) -> Tensor | None:
        """The buffer of `TreeGrowth` for the target's states; None: the draft reads none."""
        return None

    def _fits_growth(self, num_trees: int, num_reqs: int, width: int) -> bool:
        """Whether `TreeGrowth` may read so many tokens of the requests that get trees."""
        return True

    def _before_growth(self, num_trees: int, width: int) -> None:
        """What `TreeGrowth` reads besides `DraftBatch` is put in its place."""

    # -- model and cache ---------------------------------------------------------------

    def load_model(self, target_model: torch.nn.Module) -> None:
        """As vLLM's, on the device; then allocates what the verifier reads, so that profiling
        counts it."""
        with nothing_offloaded():
            super().load_model(target_model)
        self.drafted = allocate_drafted(
            self.plan, self.tree, self.max_num_reqs, self._logits_size,
            self.draft_model_config.head_dtype, self.device,
        )  # fmt: skip

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; the draft's growth works on these caches."""
        super().set_attn(*args, **kwargs)
        groups = {
            name: index
            for index, group in enumerate(self.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if name in self.draft_attn_layer_names
        }
        specs = {i: self.kv_cache_config.kv_cache_groups[i].kv_cache_spec for i in groups.values()}
        self.reading.use_cache({index: spec.block_size for index, spec in specs.items()})
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
        """What grows trees; ``shared`` is all that it gets but the model."""
        model = CachedDraftModel(
            self._cache, self.backend, self.run_draft, self.compute_logits, self.feedback_of
        )
        return TreeGrowth(**shared, model=model)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The draft's logits ``[rows, V]`` of the target's tokens."""
        return self.model.compute_logits(hidden)

    def feedback_of(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.feedback_of`."""
        return target_states

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Replaces vLLM's, which captures nothing of standalone draft models."""
        self._graphs = DraftGraphs(self.vllm_config, self.device, cudagraph_mode, self.plan)

    def capture(self) -> None:
        """Replaces vLLM's: the whole growth of a tree is one graph."""
        if self._graphs is None:
            return
        self.batch.slots.fill_(-1)
        self._graphs.capture_growth(
            lambda requests, drafts: self._growth.read_and_grow(
                requests, self.tables.levels_of(drafts), self.max_model_len
            )
        )

    @property
    def pass_widths(self) -> list[int]:
        """Rows per request of each forward of the last pass, for measuring; none: no pass."""
        if self._last_grown is None:
            return []
        deeper = self._last_grown.levels[1:]
        return [chain_width(self._last_grown), *(level.width for level in deeper)]

    def read_truncation_of(self, states: SamplingStates) -> None:
        """Where requests' top-k, top-p and min-p are; of temperatures and seeds vLLM tells."""
        self._states = states

    # -- requests ----------------------------------------------------------------------

    def start_request(self, slot: int, request: NewRequestData) -> None:
        """A new or resumed request takes this slot; `apply_starts` follows."""
        self.reading.start(slot, request.num_computed_tokens, request.block_ids)
        self.modes.start(slot, request.sampling_params)

    def apply_starts(self) -> None:
        """Makes the requests that started known to the device."""
        self.modes.apply_starts()

    def note_accepted(self, accepted: Tensor | None) -> None:
        """What was accepted of the trees of the step, before `propose`.

        Args:
            accepted: int32 ``[R', D]``: nodes by depth, then -1, of the batch's first R'
                requests, which have trees; None: none has.
        """
        self.accepted = accepted

    def begin_to_serve(self) -> None:
        """From now on requests are users', who do not need the draft: it may fail."""
        self._serves = True

    # -- one drafting pass ---------------------------------------------------------------

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
        """Replaces vLLM's: the draft reads what was committed and grows trees.

        Returns:
            Draft tokens int64 ``[R, N]`` in stored tree order. Requests that get
            no tree, or a smaller one, have anything there: `drafted` says so.
        """
        self._take_target_states(input_batch, last_hidden_states, aux_hidden_states)
        if dummy_run:  # the first one comes before there are caches to grow trees in
            self._dummy_forward(input_batch)
            if is_profile:
                self._dummy_logits()
            return self.draft_tokens[: input_batch.num_reqs]
        self._last_grown = None
        drafts = min(self.num_speculative_steps, self.max_drafts)
        if num_speculative_tokens is not None:
            drafts = min(drafts, num_speculative_tokens)
        if not self.has_failed:
            try:
                self._advance(input_batch, num_sampled, temperature, seeds, drafts)
            except Exception:
                self._survive()
        if self.has_failed:
            drafts = 0
        tokens = self.drafted.tokens[: input_batch.num_reqs, 1:]
        # What vLLM did not ask for it overwrites with -1, in place. A request that gets no
        # tree later is scored with what is in its row: ids that the target can embed.
        return tokens.clone() if drafts < self.num_speculative_steps else tokens

    def _advance(
        self,
        batch: InputBatch,
        num_sampled: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        drafts: int,
    ) -> None:
        """Reads what the step committed, as far as it has to be read, and grows the trees."""
        self.reading.gain(
            batch.idx_mapping_np,
            batch.num_computed_tokens_np,
            batch.num_scheduled_tokens,
            batch.num_draft_tokens_per_req,
            batch.is_prefilling_np,
        )
        if drafts > 0:
            self._draft(batch, num_sampled, temperature, seeds, drafts)
        elif self._reads_without_drafting(batch):
            self._only_read(batch, num_sampled, temperature, seeds)

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
        self._last_grown = None
        self.drafted.nodes.zero_()

    def _draft(
        self,
        batch: InputBatch,
        num_sampled: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        drafts: int,
    ) -> None:
        num_reqs, levels = batch.num_reqs, self.tables.levels_of(drafts)
        num_trees = min(num_reqs, self.plan.most_requests(drafts))
        width = chain_width(levels)
        is_long = self.reading.most_unread(batch.idx_mapping_np) > width
        is_long |= not self._fits_growth(num_trees, num_reqs, width)
        readers = num_reqs if is_long else num_trees
        bounds = self._begin(batch, num_sampled, temperature, seeds, levels, readers, num_trees)
        self._last_grown = levels
        max_keys = int(batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs].max()) + 1
        if is_long:
            states = self._read_ragged(batch, bounds)
            self._growth.grow(num_trees, levels, states.first(num_trees), max_keys)
            return
        self._before_growth(num_trees, width)
        if shape := self._graphs and self._graphs.shape_of(num_trees, drafts):
            self._graphs.run_fullgraph(shape)
        else:
            self._growth.read_and_grow(num_trees, levels, max_keys)

    def _only_read(
        self, batch: InputBatch, num_sampled: Tensor, temperature: Tensor, seeds: Tensor
    ) -> None:
        """Reads what requests have, and grows nothing."""
        levels = self.tables.levels_of(1)
        bounds = self._begin(
            batch, num_sampled, temperature, seeds, levels, readers=batch.num_reqs, num_trees=0
        )
        if bounds.any():
            self._read_ragged(batch, bounds)

    def _begin(
        self,
        batch: InputBatch,
        num_sampled: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        levels: DraftLevels,
        readers: int,
        num_trees: int,
    ) -> NDArray[np.int32]:
        """Rows that each request's part of the pass may have at most, int32 ``[R]``.

        The first ``readers`` requests read, and the first ``num_trees`` have trees.
        """
        bounds = np.zeros(batch.num_reqs, dtype=np.int32)
        bounds[:readers] = self.reading.take_bounds(
            batch.idx_mapping_np[:readers], self.max_num_tokens
        )
        self.batch.begin(
            requests=batch.idx_mapping,
            computed=self.req_states.num_computed_tokens.gpu,
            num_sampled=num_sampled,
            bounds=async_tensor_h2d(bounds, device=self.device),
            read=self.reading.read,
            modes=self.modes.gpu,
            most_nodes=self.modes.most_nodes,
            temperature=temperature,
            top_k=self._states.top_k.gpu,
            top_p=self._states.top_p.gpu,
            min_p=self._states.min_p.gpu,
            seeds=seeds,
            drafted_nodes=self.drafted.nodes,
            drafted_rows=self.drafted.rows,
            tree_size=levels.tree.size,
            inner_nodes=levels.num_inner,
            longest=min(self.draft_model_config.max_model_len, self.max_model_len) - 1,
            max_trees=num_trees,
        )
        return bounds

    def _read_ragged(self, batch: InputBatch, bounds: NDArray[np.int32]) -> DraftStates:
        """States at each request's last committed token, R rows.

        For prompts: every request has as many rows as it may need.
        """
        rows = RaggedRows.of(batch, bounds, self.batch, self._cache)
        return self._forward_ragged(batch, rows).rows(rows.last)

    def _forward_ragged(self, batch: InputBatch, rows: RaggedRows) -> DraftStates:
        """States at all of these rows."""
        total, positions = len(rows.positions), rows.positions
        buffers = self.input_buffers
        buffers.query_start_loc[: batch.num_reqs + 1] = rows.first
        buffers.seq_lens[: batch.num_reqs] = self.batch.starts[: batch.num_reqs] + rows.first.diff()
        buffers.positions[:total] = positions
        metadata = self._build_attn_metadata(
            num_reqs=batch.num_reqs,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.NONE, total, batch.num_reqs),
            query_start_loc_np=rows.first_np,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=int(np.diff(rows.first_np).max()),
            slot_mappings=rows.slots,
        )
        last = self.req_states.all_token_ids.gpu.shape[1] - 1
        return self.run_draft(
            self.req_states.all_token_ids.gpu[
                batch.idx_mapping[rows.requests], (positions + self.lag).clamp(max=last)
            ],
            positions.clamp(max=self.draft_model_config.max_model_len - 1),
            metadata,
            self._cache.by_layer(rows.slots),
            self._ragged_feedback(rows),
        )

    def _dummy_forward(self, batch: InputBatch) -> None:
        """For memory profiling: the largest forward, and the widest level's logits."""
        rows = batch.num_tokens
        states = self.run_draft(
            batch.input_ids[:rows], batch.positions[:rows], None, None, self._dummy_feedback(rows)
        )
        self.compute_logits(states.hidden[: min(rows, self.plan.widest_level)])

    def _dummy_logits(self) -> None:
        """Likewise what the target's logits at all nodes take."""
        scored = most_scored(scheduled_drafts(self.vllm_config), self.max_num_tokens)
        dtype = self.vllm_config.model_config.head_dtype
        take_logits_memory(scored, self.tree.size, self._logits_size, dtype, self.device)
