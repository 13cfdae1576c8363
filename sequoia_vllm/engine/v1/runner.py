"""vLLM's V1 CPU model runner with Sequoia trees; each method says what it replaces."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from sequoia_vllm.adaptation.step_times import Timed
from sequoia_vllm.adaptation.told_branches import DISK
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.offload import is_offloaded
from sequoia_vllm.engine.runner.attention_layers import replaced_backends, supported_layers
from sequoia_vllm.engine.runner.cpu_attention import CPU_BACKENDS, unsupported_attention
from sequoia_vllm.engine.runner.cpu_linear import replaced_linear_layers
from sequoia_vllm.engine.runner.tensor_parallel import from_rank0, take_from_rank0
from sequoia_vllm.engine.v1.drafting_runner import DraftingRunner
from sequoia_vllm.engine.v1.pass_times import time_passes
from sequoia_vllm.engine.v1.path_edits import drawn_by_paths, edited_by_paths
from sequoia_vllm.engine.v1.verifier import (
    combine_outputs,
    cut,
    rows_of,
    truncation_of,
    without_discarded,
)
from sequoia_vllm.metrics.counts import paths_of
from sequoia_vllm.step.commit import TargetCaches
from sequoia_vllm.step.score import StepState, lay_out
from sequoia_vllm.step.verify import TargetDistribution, TreeVerifier
from sequoia_vllm.verification.methods import method_of
from sequoia_vllm.verification.topology import VerifyResult


class SequoiaCPUModelRunner(DraftingRunner):
    """Scores, verifies and commits the token trees that it grows within vLLM's V1 step.

    vLLM's step calls, in this order: `_update_states` -> `_prepare_inputs` (positions by depth) ->
    `_build_attention_metadata` (tree masks) -> `_model_forward` (the target scores the trees) ->
    `_sample` (verify, commit) -> `propose_draft_token_ids` (the draft grows the next trees).
    """

    attn_groups: list[list[Any]]
    step_times: Sequence[Timed] = ()  # for the first step's outcome

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        method = SequoiaSettings.of(vllm_config).verification
        self.tree_verifier = TreeVerifier(
            greedy_argmax=self.sampler.greedy_sample,
            seeded_argmax=torch.ops._C.fused_gumbel_argmax,
            method=method,
        )
        method_of(method).compile_host()  # now, not in the first step
        self._trees: StepState | None = None
        self._verified: tuple[StepState, VerifyResult] | None = None
        self._target_metadata: dict[str, Any] = {}
        self._target_caches = TargetCaches()

    # -- model and cache -----------------------------------------------------------

    # Until: the CPU platform honours a backend chosen by the speculative method.
    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Loads the model with our attention and linear layers.

        Raises:
            ValueError: A layer's attention cannot have trees, see `supported_layers`.
        """
        with replaced_backends(CPU_BACKENDS), replaced_linear_layers(self.vllm_config):
            super().load_model(load_dummy_weights)
        layers = supported_layers(self.vllm_config, unsupported_attention)
        self._target_layers = [
            name for name in layers if name not in self.drafter._draft_attn_layer_names
        ]

    # Until: vLLM's library takes little longer for a few rows than for one on these CPUs.
    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's; layers that have our kernel keep it, as compiled code calls it."""
        with replaced_linear_layers(self.vllm_config):
            super().reload_weights(*args, **kwargs)

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

    def time_steps(self) -> None:
        """Notes what steps take, see `time_passes`, if the engine adapts and holds all weights."""
        if is_offloaded(self.vllm_config):  # 15 passes may take minutes
            self.drafter.foretold.branches.pass_time = DISK
        elif SequoiaSettings.of(self.vllm_config).adapts_as is not None:
            self.step_times = time_passes(self)

    def run_target(self, rows: int) -> None:
        """Runs a pass over so many dummy tokens of no request, and computes their logits."""
        # vLLM's dummy run would run the draft, too.
        with patched(self, "speculative_config", None):
            hidden, _ = self._dummy_run(rows)
        self.model.compute_logits(hidden[:rows])

    # -- before the target's forward -------------------------------------------------

    # Until: vLLM prepares no drafts where none are scheduled.
    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Any:
        """Calls vLLM's; a step that neither scores nor grows trees runs as without speculation."""
        scores = bool(scheduler_output.scheduled_spec_decode_tokens)
        speculates = scores or self._drafts_each(scheduler_output) > 0
        # None while inputs without drafts are prepared, and from a step that drafts nothing to the
        # next: vLLM would prepare drafts that are not there, which takes longer than such a step
        # has to spare. Until: vLLM prepares no drafts where none are scheduled.
        self.speculative_config = self.vllm_config.speculative_config if speculates else None
        return super().execute_model(scheduler_output, intermediate_tensors)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        """Calls vLLM's, then gives each tree node the position of its depth; slots stay."""
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        speculative = self.speculative_config if scheduled else None
        with patched(self, "speculative_config", speculative):
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if not scheduled:
            self._trees = None
            return prepared
        num_reqs = self.input_batch.num_reqs
        self._trees = lay_out(
            self._tables,
            scheduled,
            self._drafts,
            self.input_batch.req_id_to_index,
            self._follows_grammar,
            self.query_start_loc.np[1 : num_reqs + 1],
            self.optimistic_seq_lens_cpu[:num_reqs].numpy(),
        )
        if (trees := self._trees) is not None:
            rows, shifts = trees.shifts()
            self.positions[rows] += shifts
            if self.uses_mrope:
                self.mrope_positions.gpu[:, rows] += shifts
        return prepared

    # Until: vLLM's metadata carries a tree mask, and its kernel masks values, not weights alone: a
    # chain's rejected NaN would reach the tokens before it.
    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Builds vLLM's for the target's layers only, then adds the trees' rows and masks."""
        # Lacks the draft's while the target's metadata is built: the draft builds its own. Until:
        # vLLM builds no metadata for layers that do not run.
        with patched(self, "attn_groups", self._groups_of_target):
            metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if (trees := self._trees) is not None:
            self._target_metadata = metadata
            own = [metadata[name] for name in self._target_layers]
            for layer_metadata in {id(m): m for m in own}.values():
                layer_metadata.tree = trees.queries(
                    layer_metadata.block_table, layer_metadata.num_actual_tokens
                )
        return metadata, common

    # -- after it: verify and commit ---------------------------------------------------

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        """Verifies trees and commits; requests without drafts go through vLLM's sampler."""
        assert logits is not None
        trees, self._trees, self._verified = self._trees, None, None
        if self.speculative_config is not None:
            ends = self.query_start_loc.gpu[1 : self.input_batch.num_reqs + 1]
            scored = spec_decode_metadata.logits_indices if spec_decode_metadata else ends - 1
            self.drafter.learn(scored, logits)
        metadata = without_discarded(
            self.input_batch.sampling_metadata, self.discard_request_mask.np
        )
        if (budgets := self._budgets) is not None:
            budgets.follow([self.requests[name] for name in self.input_batch.req_ids])
            metadata = replace(metadata, thinking_budget_state_holder=budgets)
        if trees is None:
            output = self.sampler(logits=logits, sampling_metadata=metadata)
            take_from_rank0(output.sampled_token_ids)
            if self.drafter.foretold.counts:
                self._count_predictions(output.sampled_token_ids, None)
            return output
        params = self._params()
        edited = edited_by_paths(logits, trees, metadata, params, self.input_batch)
        if budgets is not None:
            edited = budgets.force_nodes(edited, trees)
        truncation = truncation_of(metadata, params)
        edit = drawn_by_paths(trees, metadata, self.input_batch.num_reqs)
        target = TargetDistribution(edited, metadata.temperature, truncation, cut, edit)
        result = self._verify(trees, target, metadata)
        output = combine_outputs(
            self.sampler, trees, result, logits, target, metadata, self.input_batch.num_reqs
        )
        if self.drafter.foretold.counts:
            self._count_predictions(output.sampled_token_ids, trees)
        self._commit(trees, result)
        self._verified = trees, result
        counted = trees.counted(result.accepted_nodes)
        self.stats.observe(paths_of(self.tree, *counted, trees.is_dynamic))
        drafted = counted[1] > 0
        if drafted.any():
            accepted = float(result.num_accepted.numpy()[drafted].mean())
            self.drafter.foretold.branches.note_drafted(accepted)
        self.drafter.foretold.has_branches |= not drafted.all()
        return output

    def _verify(
        self, trees: StepState, target: TargetDistribution, metadata: SamplingMetadata
    ) -> VerifyResult:
        result = self.tree_verifier.verify(trees, target, metadata.generators)
        return VerifyResult(
            *from_rank0(result.accepted_nodes, result.output_tokens, result.num_accepted)
        )

    def _commit(self, trees: StepState, result: VerifyResult) -> None:
        self._target_caches.commit(
            self._kv_caches, self._target_metadata, trees.first_row, trees.num_nodes,
            result.accepted_nodes,
        )  # fmt: skip

    @cached_property
    def _kv_caches(self) -> dict[str, Tensor]:
        """The target's, by layer, from the first commit on."""
        layers = self.compilation_config.static_forward_context
        return {name: layers[name].kv_cache for name in self._target_layers}

    # Until: vLLM counts the rows that a request's tokens are drawn from.
    def _get_nans_in_logits(self, logits: Tensor | None) -> dict[str, int]:
        """Calls vLLM's, but gives it for each request the rows that plain decoding has."""
        if logits is not None and self._verified is not None:
            _, tokens, rows, is_plain = rows_of(*self._verified, self.input_batch.num_reqs)
            tokens[is_plain, 0] = 0
            logits = logits[rows].masked_fill_((tokens < 0)[..., None], 0).flatten(1)
        return super()._get_nans_in_logits(logits)

    # Until: vLLM stops rewinding on CPUs.
    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Calls vLLM's, but keeps it from rewinding generators: `_sample` has not advanced them."""
        # Empty while _bookkeeping_sync rewinds what it finds there.
        with patched(self.input_batch, "generators", {}):
            return super()._bookkeeping_sync(*args, **kwargs)
