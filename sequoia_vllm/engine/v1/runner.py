"""vLLM's V1 CPU model runner with Sequoia trees; each method says what it replaces."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.common.request_options import most_drafts
from sequoia_vllm.engine.common.settings import SequoiaSettings, without_speculation
from sequoia_vllm.engine.common.step_messages import is_loaded
from sequoia_vllm.engine.core.eligibility import requests_to_read
from sequoia_vllm.engine.core.grammar import thinks_first
from sequoia_vllm.engine.runner.attention_layers import replaced_backends, supported_layers
from sequoia_vllm.engine.runner.cpu_attention import CPU_BACKENDS, unsupported_attention
from sequoia_vllm.engine.runner.draft_blocks import DraftBlocks
from sequoia_vllm.engine.runner.draft_failure import survive_draft
from sequoia_vllm.engine.runner.kv_commit import TargetCaches, accepted_moves
from sequoia_vllm.engine.runner.step_stats import StepStats
from sequoia_vllm.engine.runner.tensor_parallel import from_rank0, take_from_rank0
from sequoia_vllm.engine.v1.batch_trees import Draft, ScoringTreesV1, logits_rows, schedule_trees
from sequoia_vllm.engine.v1.draft_progress import CommittedTokens, DraftProgressV1
from sequoia_vllm.engine.v1.draft_sampling import DraftSampling
from sequoia_vllm.engine.v1.path_edits import PathEdits
from sequoia_vllm.engine.v1.proposer import TreeProposerV1
from sequoia_vllm.engine.v1.sampler_output import (
    combine_outputs,
    forget_stale_budgets,
    without_discarded,
)
from sequoia_vllm.engine.v1.seeded import SessionSeeds
from sequoia_vllm.engine.v1.target_distribution import TargetDistribution, truncation_of
from sequoia_vllm.engine.v1.verifier import TreeVerifierV1
from sequoia_vllm.verification.methods import method_of
from sequoia_vllm.verification.topology import VerifyResult


def build_all_logitsprocs(vllm_config: VllmConfig, *args: Any) -> Any:
    """Calls vLLM's `build_logitsprocs` as for an engine without speculation."""
    return build_logitsprocs(without_speculation(vllm_config), *args)


class SequoiaCPUModelRunner(CPUModelRunner):
    """Grows, scores, verifies and commits token trees within vLLM's V1 step.

    vLLM's step calls, in this order: `_update_states` (requests finish, begin, resume) ->
    `_prepare_inputs` (positions by depth) -> `_build_attention_metadata` (tree masks) ->
    `_model_forward` (the target scores the trees) -> `_sample` (verify, commit) ->
    `propose_draft_token_ids` (the draft reads the committed tokens and grows the next trees).
    """

    attn_groups: list[list[Any]]
    speculative_config: Any

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        # The draft's configuration, made from this one, would choose blocks anew, and not those
        # that the target's latents need. Until: vLLM leaves a draft the target's blocks.
        vllm_config.cache_config.user_specified_block_size = True
        # vLLM drops logits processors when it speculates; requests that need them get no drafts.
        # Until: vLLM asks the speculative method.
        with patched(gpu_model_runner, "build_logitsprocs", build_all_logitsprocs):
            super().__init__(vllm_config, device)
        settings = SequoiaSettings.of(vllm_config)
        self.tree = settings.tree
        self.max_drafts = self.tree.num_speculative_tokens  # lowered by measuring tools
        self.draft_has_failed = False
        # The proposer of chains; ours grows trees.
        self.drafter = TreeProposerV1(vllm_config, device, self)
        self.tree_verifier = TreeVerifierV1(
            greedy_argmax=self.sampler.greedy_sample,
            seeded_argmax=torch.ops._C.fused_gumbel_argmax,
            method=settings.verification,
        )
        method_of(settings.verification).compile_host()  # now, not in the first step
        self.stats = StepStats(self.tree)
        self._edits = PathEdits(self.tree, device)
        self._thinks = thinks_first(vllm_config)
        self._tables = TreeTables(self.tree, device)
        self._drafts: dict[str, Draft] = {}
        self._session_seeds = SessionSeeds()
        self._trees: ScoringTreesV1 | None = None
        self._target_metadata: dict[str, Any] = {}
        self._target_caches: TargetCaches | None = None

    # -- model and cache -----------------------------------------------------------

    # Until: the CPU platform honours a backend chosen by the speculative method.
    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Loads the model with our attention.

        Raises:
            ValueError: A layer's attention cannot score trees; the message names both.
        """
        with replaced_backends(CPU_BACKENDS):
            super().load_model(load_dummy_weights)
        layers = supported_layers(self.vllm_config, unsupported_attention)
        self._target_layers = [
            name for name in layers if name not in self.drafter._draft_attn_layer_names
        ]

    @cached_property
    def draft_progress(self) -> DraftProgressV1:
        """How far the draft has read each request; needs the KV cache's configuration."""
        group = self.drafter.kv_cache_gid
        spec = self.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        return DraftProgressV1(self.max_num_tokens, DraftBlocks({group: spec.block_size}))

    @cached_property
    def _groups_of_target(self) -> list[list[Any]]:
        """vLLM's attention groups with layers of the target, by cache group."""
        target = set(self._target_layers)
        return [
            [group for group in groups if not target.isdisjoint(group.layer_names)]
            for groups in self.attn_groups
        ]

    def forget_steps(self) -> None:
        """Resets the counters after steps that served no user (warm-up)."""
        self.stats.take_paths()
        self.stats.reset()

    # -- before the target's forward -------------------------------------------------

    # Until: vLLM prepares no drafts where none are scheduled.
    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Any:
        """Calls vLLM's; a step that neither scores nor grows trees runs as without speculation."""
        self._speculates(
            bool(scheduler_output.scheduled_spec_decode_tokens)
            or self._drafts_each(scheduler_output) > 0
        )
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if output is not None:  # there is nothing to sample
            self._speculates(True)
        return output

    # Until: vLLM prepares no drafts where none are scheduled.
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Calls vLLM's, and ends what `execute_model` began."""
        try:
            return super().sample_tokens(grammar_output)
        finally:
            self._speculates(True)

    def _speculates(self, does: bool) -> None:
        # None while inputs without drafts are prepared, and in steps that draft nothing: vLLM would
        # prepare drafts that are not there, which takes longer than such a step has to spare.
        # Until: vLLM prepares no drafts where none are scheduled.
        self.speculative_config = self.vllm_config.speculative_config if does else None

    def _drafts_each(self, scheduler_output: SchedulerOutput) -> int:
        """Nodes that this step grows for each request."""
        most = 0 if self.draft_has_failed else self.max_drafts
        return min(scheduler_output.num_spec_tokens_to_schedule, most)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Calls vLLM's, and notes requests that finish, start, or resume after preemption."""
        for request_id in scheduler_output.finished_req_ids:
            self._drafts.pop(request_id, None)
            self._session_seeds.forget(request_id)
            self.draft_progress.forget(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            known = self.requests.get(new.req_id)
            if known is not None and new.req_id not in scheduler_output.finished_req_ids:
                self._session_seeds.continue_session(known, new.num_computed_tokens)
            loaded = is_loaded(scheduler_output, new.req_id)
            self.draft_progress.start(new.req_id, new.num_computed_tokens, new.block_ids, loaded)
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                computed = cached.num_computed_tokens[index]
                loaded = is_loaded(scheduler_output, request_id)
                self.draft_progress.start(request_id, computed, blocks, loaded)
            elif blocks is not None:
                self.draft_progress.extend(request_id, blocks)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        """Calls vLLM's, then gives each tree node the position of its depth.

        Slots stay as vLLM computed them, from consecutive positions. A step without drafts is
        prepared as without speculation.
        """
        speculative = self.speculative_config
        if not scheduler_output.scheduled_spec_decode_tokens:
            self.speculative_config = None
        try:
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        finally:
            self.speculative_config = speculative
        if not scheduler_output.scheduled_spec_decode_tokens:
            self._trees = None
            return prepared
        num_reqs = self.input_batch.num_reqs
        self._trees = schedule_trees(
            self.tree,
            scheduler_output.scheduled_spec_decode_tokens,
            self._drafts,
            self.input_batch.req_id_to_index,
            self._follows_grammar,
            self.query_start_loc.np[1 : num_reqs + 1],
            self.optimistic_seq_lens_cpu[:num_reqs].numpy(),
            self.device,
        )
        if (trees := self._branching_trees) is not None:
            shifts = self._tables.shifts[: trees.tokens.shape[1]].expand_as(trees.is_node)
            rows = trees.rows[trees.is_node]
            self.positions[rows] += shifts[trees.is_node]
            if self.uses_mrope:
                self.mrope_positions.gpu[:, rows] += shifts[trees.is_node]
        return prepared

    @property
    def _branching_trees(self) -> ScoringTreesV1 | None:
        """This step's trees; None if they are chains: vLLM's positions and masks fit those."""
        trees = self._trees
        return None if trees is None or trees.tokens.shape[1] <= self.tree.chain_nodes else trees

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        """Replaces vLLM's: our verifier needs only the rows to compute logits of."""
        return logits_rows(num_draft_tokens, cu_num_scheduled_tokens, self.device)

    # Until: vLLM's metadata carries a tree mask.
    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Builds vLLM's for the target's layers only, then adds the trees' rows and masks.

        The draft builds its own metadata for each pass.
        """
        # Lacks the draft's while the target's metadata is built: the draft builds its own. Until:
        # vLLM builds no metadata for layers that do not run.
        all_groups, self.attn_groups = self.attn_groups, self._groups_of_target
        try:
            metadata, common = super()._build_attention_metadata(*args, **kwargs)
        finally:
            self.attn_groups = all_groups
        if (trees := self._branching_trees) is not None:
            self._target_metadata = metadata
            own = (metadata[name] for name in self._target_layers)
            for layer_metadata in {id(m): m for m in own}.values():
                layer_metadata.tree = trees.queries(layer_metadata, self._tables.ancestors)
        return metadata, common

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls vLLM's, and times it."""
        num_reqs = self.input_batch.num_reqs
        tokens = int(self.query_start_loc.np[num_reqs]) if num_reqs else 0
        with self.stats.timed("target", num_reqs, tokens):
            return super()._model_forward(*args, **kwargs)

    # -- after it: verify and commit ---------------------------------------------------

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        """Replaces vLLM's rejection sampler by the Sequoia verifier, then commits.

        Requests without drafts go through vLLM's sampler, as without speculation.
        """
        assert logits is not None
        trees, branching, self._trees = self._trees, self._branching_trees, None
        if self.speculative_config is not None:
            ends = self.query_start_loc.gpu[1 : self.input_batch.num_reqs + 1]
            scored = spec_decode_metadata.logits_indices if spec_decode_metadata else ends - 1
            self.drafter.learn(scored, logits)
        if self.input_batch.thinking_budget_state_holder is not None:
            # The sampler gets one row per request, not one per draft.
            # Requests with a budget have no drafts, and in a step without any the holder counts no
            # rows for them: it forces the first request's tokens. Until: vLLM counts the rows that
            # its sampler is given.
            self.input_batch.thinking_budget_state_holder.in_spec_mode = False
            forget_stale_budgets(self.input_batch.thinking_budget_state_holder, self._params())
        metadata = without_discarded(
            self.input_batch.sampling_metadata, self.discard_request_mask.np
        )
        if trees is None:
            output = self.sampler(logits=logits, sampling_metadata=metadata)
            take_from_rank0(output.sampled_token_ids)
            return output
        target = self._target_of(trees, logits, metadata)
        result = self._verify(trees, target, metadata)
        output = combine_outputs(
            self.sampler, trees, result, logits, target, metadata, self.input_batch.num_reqs
        )
        if branching is not None:  # a chain's accepted tokens lie in place already
            self._commit(branching, result)
        self.stats.observe(result.accepted_nodes.cpu().numpy(), trees.num_nodes.cpu().numpy())
        return output

    def _target_of(
        self, trees: ScoringTreesV1, logits: Tensor, metadata: SamplingMetadata
    ) -> TargetDistribution:
        params = self._params()
        logits = self._edits.edited(logits, trees, metadata, params, self.input_batch)
        return TargetDistribution(logits, metadata.temperature, truncation_of(metadata, params))

    def _verify(
        self, trees: ScoringTreesV1, target: TargetDistribution, metadata: SamplingMetadata
    ) -> VerifyResult:
        result = self.tree_verifier.verify(trees, target, metadata.generators)
        return VerifyResult(
            *from_rank0(result.accepted_nodes, result.output_tokens, result.num_accepted)
        )

    def _commit(self, trees: ScoringTreesV1, result: VerifyResult) -> None:
        if self._target_caches is None:
            layers = self.compilation_config.static_forward_context
            caches = {name: layers[name].kv_cache for name in self._target_layers}
            self._target_caches = TargetCaches(caches, self._target_metadata)
        source, target = accepted_moves(trees.first_row, result.accepted_nodes)
        self._target_caches.move(source, target, self._target_metadata)

    # Until: vLLM stops rewinding on CPUs.
    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Calls vLLM's, but keeps it from rewinding generators: `_sample` has not advanced them."""
        # Empty while _bookkeeping_sync rewinds what it finds there.
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    # -- grow the next trees -------------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Does not judge the whole batch as vLLM does: `requests_to_read` decides per request."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Tensor,
        sampling_metadata: SamplingMetadata,
        *unused: Any,
    ) -> list[list[int]]:
        """Replaces vLLM's: the draft reads the committed tokens and grows trees.

        A draft that fails is not run again: see `survive_draft`.

        Returns:
            Draft tokens of each request in stored tree order; empty: no tree.
        """
        try:
            return self._grow_trees(scheduler_output, sampled_token_ids, sampling_metadata)
        except Exception:
            survive_draft(self.vllm_config)
            self.draft_has_failed = True
        return [[] for _ in range(self.input_batch.num_reqs)]

    def _grow_trees(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in range(self.input_batch.num_reqs)]
        drafts_each = self._drafts_each(scheduler_output)
        if drafts_each == 0:
            return drafts
        committed = self._committed_tokens(sampled_token_ids)
        if committed is None:
            return drafts
        logits = self.drafter.advance(committed)
        chosen = self._requests_to_draft(committed)
        if len(chosen) == 0:
            return drafts
        levels = self._tables.levels_of(drafts_each)
        roots = committed.last[chosen]
        requests = committed.requests[chosen]
        grown = self.drafter.grow(
            levels,
            root_logits=logits if len(chosen) == len(logits) else logits[chosen],
            root_tokens=committed.tokens[roots],
            root_positions=committed.positions[roots],
            requests=requests,
            sampling=DraftSampling.of(
                requests,
                sampling_metadata,
                self.input_batch.generators,
                truncation_of(sampling_metadata, self._params()),
                levels.tree.depth,
            ),
        )
        tokens = grown.tokens[:, 1:].tolist()
        for row, request in enumerate(requests.tolist()):
            request_id = self.input_batch.req_ids[request]
            self._drafts[request_id] = Draft(grown, row)
            # Cutting is safe: every prefix of a tree is a tree.
            drafts[request] = tokens[row][: most_drafts(self.requests[request_id].sampling_params)]
        return drafts

    def _committed_tokens(self, sampled_token_ids: Tensor) -> CommittedTokens | None:
        """Prompt chunks, roots and emitted tokens that the draft has yet to read."""
        num_reqs = self.input_batch.num_reqs
        scheduled = np.diff(self.query_start_loc.np[: num_reqs + 1])
        drafted = [len(ids) for ids in self.input_batch.spec_token_ids[:num_reqs]]
        computed = self.input_batch.num_computed_tokens_cpu[:num_reqs]
        sampled = sampled_token_ids.cpu().numpy()
        discarded = self.discard_request_mask.np[:num_reqs]
        known = (computed + scheduled - np.array(drafted)).astype(np.int64)
        num_sampled = np.where(discarded, 0, (sampled >= 0).sum(axis=1))
        prompts = self.input_batch.num_prompt_tokens[:num_reqs]
        longest = min(self.drafter.draft_max_len, self.max_model_len) - 1
        return self.draft_progress.take(
            self.input_batch.req_ids,
            self.input_batch.token_ids_cpu,
            known=known,
            sampled=sampled,
            num_sampled=num_sampled,
            reads=requests_to_read(
                self._params(), self._thinks, prompts, longest, known + num_sampled, sampled
            ),
        )

    def _requests_to_draft(self, committed: CommittedTokens) -> NDArray[np.int64]:
        """Indices in ``committed`` of the requests that get a tree now."""
        discarded = self.discard_request_mask.np[committed.requests]
        return np.flatnonzero(committed.complete & ~discarded)

    def _follows_grammar(self, request_id: str) -> bool:
        params = self.requests[request_id].sampling_params
        return params is not None and params.structured_outputs is not None

    def _params(self) -> list[Any]:
        """Each request's `SamplingParams`, in batch order."""
        return [self.requests[request].sampling_params for request in self.input_batch.req_ids]
