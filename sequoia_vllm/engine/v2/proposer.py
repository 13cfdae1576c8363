"""The proposer on Model Runner V2: reads what was committed, and grows every request's tree."""

from __future__ import annotations

from typing import Any

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
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.states import RequestState

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.draft_plan import DraftPlan, depths_by_drafts
from sequoia_vllm.drafting.growth import TreeGrowth, chain_width
from sequoia_vllm.drafting.tree_tables import DraftLevels, TreeTables
from sequoia_vllm.engine.attention_layers import freed_behind
from sequoia_vllm.engine.grammar import thinks_first
from sequoia_vllm.engine.load import fewer_drafts, scheduled_drafts
from sequoia_vllm.engine.v2.backend import TreeBackend
from sequoia_vllm.engine.v2.draft_graphs import DraftGraphs
from sequoia_vllm.engine.v2.draft_loading import nothing_offloaded
from sequoia_vllm.engine.v2.draft_model import CachedDraftModel, DraftCache
from sequoia_vllm.engine.v2.reading import DraftReading
from sequoia_vllm.engine.v2.request_modes import RequestModes
from sequoia_vllm.engine.v2.tree_memory import allocate_drafted, most_scored, take_logits_memory
from sequoia_vllm.engine.vocabulary import draft_vocabulary


class TreeProposer(StandaloneARSpeculator):
    """vLLM's draft-model speculator (loading, KV cache, buffers) growing trees.

    Its `propose` is replaced. Whatever a step decided stays on the device.
    """

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
        self.plan = DraftPlan(tree, drafts, self.max_num_tokens, fewer)
        steps_ahead = vllm_config.max_concurrent_batches - 1
        self.reading = DraftReading(
            self.max_num_reqs,
            depths_by_drafts(tree),
            unknown_drafts=steps_ahead * tree.num_speculative_tokens,
            device=device,
        )
        self.batch = DraftBatch(self.max_num_reqs, device)
        self._vocabulary = draft_vocabulary(vllm_config, device)
        self._logits_size = vllm_config.model_config.get_vocab_size()
        self._graphs: DraftGraphs | None = None
        self._last_grown: DraftLevels | None = None

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
        self._cache = DraftCache(self.block_tables, groups, windows, self.expanded_slot_mappings)
        self._growth = TreeGrowth(
            batch=self.batch,
            drafted=self.drafted,
            model=CachedDraftModel(
                self._cache, self.backend, self._run_model, self._compute_logits
            ),
            inputs=self._cache.inputs(self.max_num_reqs),
            token_ids=self.req_states.all_token_ids.gpu,
            max_lens=(self.max_model_len, self.draft_model_config.max_model_len),
            depth=self.tree.depth,
        )

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
        if dummy_run:  # the first one comes before there are caches to grow trees in
            self._dummy_forward(input_batch)
            if is_profile:
                self._dummy_logits()
            return self.draft_tokens[: input_batch.num_reqs]
        self.reading.gain(
            input_batch.idx_mapping_np,
            input_batch.num_computed_tokens_np,
            input_batch.num_scheduled_tokens,
            input_batch.num_draft_tokens_per_req,
            input_batch.is_prefilling_np,
        )
        self._last_grown = None
        drafts = min(self.num_speculative_steps, self.max_drafts)
        if num_speculative_tokens is not None:
            drafts = min(drafts, num_speculative_tokens)
        if drafts > 0:
            self._draft(input_batch, num_sampled, temperature, seeds, drafts)
        elif self._cache.windows and input_batch.is_prefilling_np.any():
            # Later what lies before windows could not be kept, see `leave_out_before_windows`.
            self._read_prompts(input_batch, num_sampled, temperature, seeds)
        tokens = self.drafted.tokens[: input_batch.num_reqs, 1:]
        # What vLLM did not ask for it overwrites with -1, in place. A request that gets no
        # tree later is scored with what is in its row: ids that the target can embed.
        return tokens.clone() if drafts < self.num_speculative_steps else tokens

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
        is_long = self.reading.most_unread(batch.idx_mapping_np) > chain_width(levels)
        readers = num_reqs if is_long else num_trees
        bounds = self._begin(batch, num_sampled, temperature, seeds, levels, readers, num_trees)
        self._last_grown = levels
        max_keys = int(batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs].max()) + 1
        if is_long:
            hidden = self._read_ragged(batch, bounds)
            self._growth.grow(num_trees, levels, hidden[:num_trees], max_keys)
        elif shape := self._graphs and self._graphs.shape_of(num_trees, drafts):
            self._graphs.run_fullgraph(shape)
        else:
            self._growth.read_and_grow(num_trees, levels, max_keys)

    def _read_prompts(
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

    def _read_ragged(self, batch: InputBatch, bounds: np.ndarray) -> Tensor:
        """Hidden states ``[R, H]`` at each request's last committed token.

        For prompts: every request has as many rows as it may need.
        """
        num_reqs = batch.num_reqs
        starts, counts = self.batch.starts[:num_reqs], self.batch.counts[:num_reqs]
        first_rows = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(bounds, out=first_rows[1:])
        total = int(first_rows[-1])
        request_np = np.repeat(np.arange(num_reqs), bounds)
        offset_np = (np.arange(total) - first_rows[request_np]).astype(np.int32)
        query_start_loc = async_tensor_h2d(first_rows, device=self.device)
        request = async_tensor_h2d(request_np, device=self.device)
        offset = async_tensor_h2d(offset_np, device=self.device)
        positions = (starts[request] + offset).long()
        self.input_buffers.query_start_loc[: num_reqs + 1] = query_start_loc
        self.input_buffers.seq_lens[:num_reqs] = starts + query_start_loc.diff()
        slots = self._cache.slots(
            batch.idx_mapping, query_start_loc, positions, offset < counts[request]
        )
        if self._cache.windows:
            # The target's before this step; vLLM frees nothing by what steps under way compute.
            computed = batch.seq_lens[:num_reqs] - batch.query_start_loc[: num_reqs + 1].diff()
            self._cache.leave_out_before_windows(slots, positions, computed[request])
        self.input_buffers.positions[:total] = positions
        metadata = self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.NONE, total, num_reqs),
            query_start_loc_np=first_rows,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=int(bounds.max()),
            slot_mappings=slots,
        )
        last = self.req_states.all_token_ids.gpu.shape[1] - 1
        hidden = self._run_model(
            self.req_states.all_token_ids.gpu[
                batch.idx_mapping[request], positions.clamp(max=last)
            ],
            positions.clamp(max=self.draft_model_config.max_model_len - 1),
            metadata,
            self._cache.by_layer(slots),
            None,
        )
        return hidden[last_rows(query_start_loc, counts, total)]

    def _run_model(self, input_ids: Tensor, *args: Any) -> Tensor:
        """As vLLM's, given tokens of the target."""
        return super()._run_model(self._vocabulary.read(input_ids), *args)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """The draft's logits ``[rows, V]`` of the target's tokens."""
        return self._vocabulary.target_logits(self.model.compute_logits(hidden))

    def _dummy_forward(self, batch: InputBatch) -> None:
        """For memory profiling: the largest forward, and the widest level's logits."""
        rows = batch.num_tokens
        hidden = self._run_model(batch.input_ids[:rows], batch.positions[:rows], None, None, None)
        self._compute_logits(hidden[: min(rows, self.plan.widest_level)])

    def _dummy_logits(self) -> None:
        """Likewise what the target's logits at all nodes take."""
        scored = most_scored(scheduled_drafts(self.vllm_config), self.max_num_tokens)
        dtype = self.vllm_config.model_config.head_dtype
        take_logits_memory(scored, self.tree.size, self._logits_size, dtype, self.device)


def last_rows(first_rows: Tensor, counts: Tensor, total: int) -> Tensor:
    """The row of each request's last token, int32 ``[R]``; any row for one that reads nothing.

    Args:
        first_rows: int32 ``[R + 1]``: of each request; where the budget ends, those of
            the last requests lie past the last row.
        counts: int32 ``[R]``: tokens that each request reads.
        total: Rows of all, at least 1.
    """
    return (first_rows[:-1] + counts - 1).clamp(min=0, max=total - 1)
