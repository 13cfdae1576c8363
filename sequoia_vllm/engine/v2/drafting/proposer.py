"""The proposer on Model Runner V2: reads committed tokens, and grows every request's tree."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from sequoia_vllm.drafting.draft_batch import DraftBatch, SlotStates
from sequoia_vllm.drafting.draft_plan import MOST_RAGGED_ROWS, DraftPlan, depths_by_drafts
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.dynamic_levels import DynamicLevels, SlotTables
from sequoia_vllm.drafting.growth import TreeGrowth
from sequoia_vllm.drafting.tree_tables import DraftLevels, TreeTables
from sequoia_vllm.engine.common.draft_schedule import (
    fewer_drafts,
    reachable_drafts,
    scheduled_drafts,
)
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core.eligibility import has_branches_on_v2
from sequoia_vllm.engine.runner.tensor_parallel import (
    make_communicator,
    survive_draft,
    take_from_rank0,
)
from sequoia_vllm.engine.v2.drafting.committed_reader import CommittedReader, max_keys
from sequoia_vllm.engine.v2.drafting.draft_graphs import DraftGraphs, capture_drafting
from sequoia_vllm.engine.v2.drafting.draft_progress import DraftProgress, ModelDraftProgress
from sequoia_vllm.engine.v2.drafting.drafter import (
    DraftCache,
    DraftPass,
    HeadDrafter,
    TextDrafter,
    TreeDrafter,
)
from sequoia_vllm.engine.v2.drafting.prediction_records import PredictionRecords
from sequoia_vllm.engine.v2.drafting.request_modes import RequestModes
from sequoia_vllm.engine.v2.drafting.step_shapes import StepShapes
from sequoia_vllm.engine.v2.drafting.target_states import TargetStates
from sequoia_vllm.engine.v2.drafting.tree_memory import (
    allocate_drafted,
    has_soft_cap,
    most_scored,
    take_logits_memory,
)
from sequoia_vllm.kernels.modes import SKIP
from sequoia_vllm.verification.retrieval import WINDOW


@dataclass
class ToldByRunner:
    """What the runner tells its proposer, and vLLM does not."""

    accepted: Tensor | None = None
    """The step's accepted nodes, int32 ``[R', D]``: nodes by depth, then -1, of the first R'
    requests of the batch, which have trees; None: no request has."""
    serves: bool = False  # true once the engine serves users, and survives a draft that fails
    on_trial: bool = False  # true while graphs are captured only to learn their memory


class TreeProposerV2(DraftModelSpeculator):
    """The speculator of trees: `propose` replaces vLLM's. Outcomes stay on the device."""

    has_failed = False
    _has_trees = False  # some request may have one, for the next step
    _last_grown: DraftLevels | None = None
    _last_width = 0
    # From `allocate` on:
    drafted: DraftedTrees
    _sampling: SamplingStates
    _shapes: StepShapes
    _target_is_capped: bool
    _target_states: TargetStates | None = None
    # From `set_attn` on:
    _growth: TreeGrowth
    _reader: CommittedReader

    def __init__(
        self, drafter: TreeDrafter, req_states: RequestState, tables: TreeTables, told: ToldByRunner
    ) -> None:
        vllm_config, device = drafter.chains.vllm_config, drafter.chains.device
        super().__init__(vllm_config, device)
        self.drafter, self._told = drafter, told
        self.num_extra_query_per_req = drafter.chains.num_extra_query_per_req
        # Of passes that grow trees, by the kind of their levels; none until they are captured.
        self._graphs: dict[type[DraftLevels], DraftGraphs] = {}
        self.tables = tables
        self.tree = tree = tables.tree
        self.max_drafts = self.tree.num_speculative_tokens  # lowered by measuring tools
        self.req_states = req_states
        self.longest = min(self.draft_model_config.max_model_len, self.max_model_len) - 1
        self.modes = RequestModes(self.max_num_reqs, self.longest)
        most, settings = reachable_drafts(vllm_config), SequoiaSettings.of(vllm_config)
        self.most_scored = most_scored(most, tree.size, self.max_num_tokens)
        self.plan = DraftPlan(
            tree, scheduled_drafts(vllm_config), self.max_num_tokens, fewer_drafts(vllm_config),
            drafter.least_rows, most, isinstance(tables, SlotTables),
        )  # fmt: skip
        most_accepted = depths_by_drafts(tree)
        if drafter.reads_states:
            self.progress = DraftProgress(self.max_num_reqs, most_accepted, device)
        else:
            # vLLM schedules so many steps before it knows outcomes.
            unknown = (vllm_config.max_concurrent_batches - 1) * tree.num_speculative_tokens
            self.progress = ModelDraftProgress(self.max_num_reqs, most_accepted, unknown, device)
        # A head reads a token together with the target's state at the position before it.
        longest = tree.num_speculative_tokens if has_branches_on_v2(vllm_config) else tree.depth
        self.batch = DraftBatch(
            self.max_num_reqs, device, int(drafter.reads_states), longest,
            WINDOW if settings.retrieval else 0,
        )  # fmt: skip
        self.foretold = PredictionRecords(self.batch.predictions, tree.depth, longest)
        self.progress.may_branch = self.foretold.may_branch

    # -- model and cache ---------------------------------------------------------------

    @property
    def attn_vllm_config(self) -> VllmConfig:
        """Asks vLLM's speculator for this draft."""
        return self.drafter.chains.attn_vllm_config

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Lets the drafter load."""
        return self.drafter.load(target_model, target_attn_layer_names)

    def allocate(self, target_model: torch.nn.Module, sampling: SamplingStates) -> None:
        """Allocates what drafting and verification need besides models, before profiling.

        ``sampling`` has the sampling parameters of all request slots.
        """
        self._sampling = sampling
        make_communicator(self.device)
        self.drafted = allocate_drafted(
            self.plan, self.tree, self.max_num_reqs, self.drafter.vocab_size,
            self.draft_model_config.head_dtype, self.device,
        )  # fmt: skip
        self._shapes = StepShapes(
            self.tables, self.drafted, self.modes, SequoiaSettings.of(self.vllm_config)
        )
        self.num_query_per_req = self.drafter.queries_per_request
        self._target_is_capped = has_soft_cap(target_model)
        self.drafter.allocate(target_model)
        if isinstance(self.drafter, HeadDrafter):
            rows = max(self.plan.most_rows_read, self.max_num_reqs)
            self._target_states = TargetStates(self.drafter, target_model, rows, self.batch)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's, and prepares growth; refuses a draft whose window is too short."""
        super().set_attn(*args, **kwargs)
        cache = self.drafter.cache = DraftCache.of(
            self.block_tables, self.kv_cache_config, self.draft_attn_layer_names, self.tree.depth
        )
        self.progress.use_cache(cache.block_sizes)
        draft_max_len, states = self.draft_model_config.max_model_len, self._target_states
        self._growth = self.drafter.new_growth(
            batch=self.batch,
            drafted=self.drafted,
            inputs=cache.inputs(
                self.max_num_tokens + self.max_num_reqs,
                self.req_states.all_token_ids.gpu,
                draft_max_len,
            ),
            depth=self.tree.depth,
            longest_chain=MOST_RAGGED_ROWS,
            target_states=None if states is None else states.gathered,
        )
        self._reader = CommittedReader(
            self.drafter, self._growth, self.progress, states, self.batch,
            self._build_attn_metadata, self.input_buffers,
        )  # fmt: skip

    # -- graphs ----------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Replaces vLLM's, which captures no graphs of standalone draft models."""
        graphs_of = partial(DraftGraphs, self.vllm_config, self.device, cudagraph_mode)
        self._reader.make_graphs(graphs_of, self.plan, self.max_num_reqs, self.max_model_len)
        levels: dict[type[DraftLevels], dict[int, DraftLevels]] = {}
        for drafts in self.plan.drafts:
            for kind, found in self._shapes.every_level(drafts).items():
                levels.setdefault(kind, {})[drafts] = found
        for kind, own in levels.items():
            is_dynamic = kind is DynamicLevels
            self._graphs[kind] = graphs_of(
                partial(self._grow_captured, own),
                "Capturing growth of dynamic trees" if is_dynamic else "Capturing tree growth",
                {drafts: self.plan.graph_sizes(drafts) for drafts in own},
            )

    def _grow_captured(
        self, levels: Mapping[int, DraftLevels], requests: int, drafts: int, _: int
    ) -> None:
        """The pass that graphs hold, by the levels of so many drafts, see `DraftGraphs`."""
        self._growth.grow(requests, levels[drafts], self.max_model_len)

    @property
    def graphs(self) -> dict[str, DraftGraphs]:
        """Graphs of the draft's passes, by what these do."""
        every = {
            "read": self._reader.graphs, "growth": self._graphs.get(DraftLevels),
            "dynamic growth": self._graphs.get(DynamicLevels), "keys": self._reader.key_graphs,
        }  # fmt: skip
        return {kind: graphs for kind, graphs in every.items() if graphs is not None}

    def capture(self) -> None:
        """Replaces vLLM's: captures passes that read, and passes that grow trees."""
        if found := list(self.graphs.values()):
            self.batch.slots.fill_(-1)
            self.batch.modes.fill_(SKIP)
            capture_drafting(found, self._told.on_trial)

    # -- requests ----------------------------------------------------------------------

    def start_request(self, slot: int, request: NewRequestData, is_loaded: bool) -> None:
        """Notes a new or resumed request in this slot; `RequestModes.apply_starts` follows."""
        computed, blocks = request.num_computed_tokens, request.block_ids
        self.progress.start(slot, computed, blocks, is_loaded)
        prompt = request.prompt_token_ids or request.prefill_token_ids or []
        self.modes.start(slot, request.sampling_params, len(prompt))
        self.foretold.start(slot, request.sampling_params, len(prompt))

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
        """Replaces vLLM's: the draft reads the committed tokens and grows trees.

        Returns:
            Draft tokens int64 ``[R, N]`` in stored tree order; beyond a request's nodes any.
        """
        states = self._target_states
        if dummy_run:  # the first one comes before caches exist
            self._run_dummy(input_batch, is_profile)
            return self.draft_tokens[: input_batch.num_reqs]
        if states is not None:
            states.note(
                input_batch, last_hidden_states, aux_hidden_states, self._told.accepted, mm_inputs
            )
        self._last_grown = None
        drafts = min(self.num_speculative_steps, self.max_drafts)
        if num_speculative_tokens is not None:
            drafts = min(drafts, num_speculative_tokens)
        if not self.has_failed:
            try:
                self._advance(input_batch, num_sampled, drafts)
            except Exception:  # no request has a tree from now on
                if not self._told.serves:
                    raise
                survive_draft(self.vllm_config)
                self._last_grown, self.has_failed = None, True
                self.drafted.nodes.zero_()
        if states is not None:
            states.forget()
        if self.has_failed:
            drafts = 0
        tokens = self.drafted.tokens[: input_batch.num_reqs, 1:]
        if num_speculative_tokens == 0:
            return torch.empty_like(tokens)
        # vLLM overwrites unrequested drafts with -1, in place. Our rows must keep ids that the
        # target can embed: it scores them even where a request later gets no tree.
        return tokens.clone() if drafts < self.num_speculative_steps else tokens

    def _advance(self, batch: InputBatch, num_sampled: Tensor, drafts: int) -> None:
        """Reads the step's committed tokens if the draft must, and grows the trees."""
        slots = batch.idx_mapping_np
        self.progress.gain(batch)
        can_draft = self.modes.can_draft(slots, self.progress.committed_at_least(slots))
        reads = self._reads(can_draft)
        if drafts > 0 and can_draft.any():
            self._draft(batch, num_sampled, reads, drafts)
        elif reads.any() and self._reader.must_read(batch, reads):
            levels = self.tables.levels_of(1)
            self._reader.only_read(batch, self._begin(batch, num_sampled, reads, levels))
        elif self._has_trees:  # steps that are scheduled already must not find an old one
            self.drafted.nodes.zero_()
            self._has_trees = False

    def _reads(self, can_draft: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which requests the draft reads, bool ``[R]``, given those that can use a tree.

        With prefix caching a head reads all: others share their blocks, and it could never catch
        up.
        """
        shares = self.vllm_config.cache_config.enable_prefix_caching and self.modes.some_draft
        return np.ones_like(can_draft) if self.drafter.reads_states and shares else can_draft

    def _draft(
        self, batch: InputBatch, num_sampled: Tensor, reads: NDArray[np.bool_], drafts: int
    ) -> None:
        num_trees = min(batch.num_reqs, self.plan.most_requests(drafts))
        readers = self._reader.readers(batch, reads, num_trees)
        levels = self._shapes.choose(batch.idx_mapping_np[:num_trees], drafts)
        bounds = self._begin(batch, num_sampled, reads[:readers], levels, num_trees)
        self._has_trees, self._last_grown = True, levels
        if not isinstance(self.drafter, TextDrafter):
            self._last_width = -(-self._reader.read(batch, bounds, readers) // readers)
        graphs = self._graphs.get(type(levels))
        if not (graphs and graphs.replay(num_trees, drafts)):
            self._growth.grow(num_trees, levels, max_keys(batch))
        take_from_rank0(self.drafted.tokens[:num_trees])
        told = self.batch if self.foretold.may_branch[batch.idx_mapping_np].any() else None
        self._shapes.keep(batch.idx_mapping[:num_trees], levels, told)

    @property
    def grew_dynamic(self) -> bool:
        """Whether the trees for the next step are dynamic."""
        return isinstance(self._last_grown, DynamicLevels)

    def _begin(
        self,
        batch: InputBatch,
        num_sampled: Tensor,
        reads: NDArray[np.bool_],
        levels: DraftLevels,
        num_trees: int = 0,
    ) -> NDArray[np.int32]:
        """Prepares the pass; returns the most rows of each request, int32 ``[R]``.

        ``reads`` tells which of the first requests are read; the first ``num_trees`` get trees.
        """
        bounds = np.zeros(batch.num_reqs, dtype=np.int32)
        bounds[: len(reads)] = self.progress.take_bounds(
            batch.idx_mapping_np[: len(reads)], reads, self.max_num_tokens
        )
        slots, sampling = self.modes, self._sampling
        states = SlotStates(
            self.req_states.num_computed_tokens.gpu, self.progress.read, slots.gpu,
            slots.most_nodes, sampling.temperature.gpu, sampling.top_k.gpu, sampling.top_p.gpu,
            sampling.min_p.gpu, sampling.seeds.gpu, self.drafted.nodes, self.drafted.rows,
        )  # fmt: skip
        self.batch.begin(
            batch,
            num_sampled=num_sampled,
            bounds=async_tensor_h2d(bounds, device=self.device),
            states=states,
            levels=levels,
            longest=self.longest,
            max_trees=num_trees,
        )
        return bounds

    @property
    def pass_widths(self) -> list[int]:
        """Rows per request of each forward of the last pass, for measuring; empty: no pass."""
        if self._last_grown is None:
            return []
        return [self._last_width, *(level.width for level in self._last_grown.levels[1:])]

    # -- memory profiling ---------------------------------------------------------------

    def _run_dummy(self, batch: InputBatch, is_profile: bool) -> None:
        """Runs the largest forward; for memory profiling also takes the target's logits."""
        rows = batch.num_tokens
        if not isinstance(self.drafter, TextDrafter):
            states = None if self._target_states is None else self._target_states.dummy(rows)
            largest = DraftPass(batch.input_ids[:rows], batch.positions[:rows], states)
            ran = self.drafter.run(largest)
            self.drafter.compute_logits(ran.hidden[: min(rows, self.plan.widest_level)])
        if is_profile:
            take_logits_memory(
                self.most_scored, self.tree.size, self.drafter.vocab_size,
                self.vllm_config.model_config.head_dtype, self.device,
                capped=self._target_is_capped,
            )  # fmt: skip
