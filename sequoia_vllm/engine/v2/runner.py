"""Model Runner V2 with token trees."""

from collections.abc import Sequence
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.states import RequestState

from sequoia_vllm.adaptation.step_times import Timed
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.drafting.dynamic_levels import SlotTables
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.common.cluster import as_alone
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.common.step_messages import is_loaded
from sequoia_vllm.engine.core.eligibility import processors_without_trees
from sequoia_vllm.engine.runner.attention_layers import refuse_own_inputs, supported_layers
from sequoia_vllm.engine.runner.tensor_parallel import take_from_rank0
from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2, TreeBackend, TreeScoring
from sequoia_vllm.engine.v2.drafting.drafter import TreeDrafter
from sequoia_vllm.engine.v2.drafting.proposer import ToldByRunner, TreeProposerV2
from sequoia_vllm.engine.v2.drafting.tree_memory import log_added, most_masked
from sequoia_vllm.engine.v2.path_copies import DraftingClock, PathCopies
from sequoia_vllm.engine.v2.verification.grammar_masks import MasksOfNodes
from sequoia_vllm.engine.v2.verification.path_edits import along_paths
from sequoia_vllm.engine.v2.verification.thinking_budgets import PathBudgets
from sequoia_vllm.engine.v2.verification.verifier import TreeVerifierV2
from sequoia_vllm.metrics.counts import StepStats


class TreeRunner(GPUModelRunner):
    """Grows, scores, verifies and commits token trees within vLLM's V2 step.

    vLLM's step calls, in this order: `add_requests` -> `prepare_inputs` -> `prepare_attn`
    (positions by depth) -> the model state's `prepare_attn`, which is `_attention_metadata` (tree
    masks) -> the target's forward -> `sample` (the verifier in the rejection sampler's place, then
    the commit) -> the proposer's `propose` (the draft reads the committed tokens and grows the next
    trees) -> `take_draft_token_ids`, if the scheduler asks for drafts. Nothing waits for the
    device.
    """

    backend_class: type[TreeBackend]  # tree attention and commit of the device
    step_times: Sequence[Timed] = ()  # of decode steps, measured at start, until they are told
    rejection_sampler: TreeVerifierV2

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        settings = SequoiaSettings.of(vllm_config)
        self.tree = settings.tree
        self._tables = tables = (
            SlotTables(self.tree, device, vllm_config.scheduler_config.max_num_seqs)
            if settings.dynamic_tree
            else TreeTables(self.tree, device)
        )
        self.tree_backend = self.backend_class(tables.ancestors)
        self._told = ToldByRunner()
        ours = partial(new_proposer, tables, self.tree_backend, self._told)
        # The runner's constructor builds the speculator with it, by method.
        with patched(model_runner, "init_speculator", ours):
            super().__init__(vllm_config, device)
        # Maps adapters to requests; ours to nodes.
        self.lora_state = AdaptersOfNodes(self.max_num_reqs)
        self.stats = StepStats(self.tree)
        self._paths, self.drafting_clock = PathCopies(self.tree, device), DraftingClock(device)
        self._scoring = TreeScoring(tables, self.max_num_reqs, device)
        self._trees: ScoringTreesV2 | None = None
        self._metadata: dict[str, Any] = {}

    # -- model and cache -----------------------------------------------------------

    # Until: a backend can be chosen by the speculative method.
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model with our attention and our grammar masks; `set_up_trees` follows."""
        most = most_masked(self.speculator.most_scored, self.max_num_reqs, self.max_num_tokens)
        with (
            self.tree_backend.replace_attention(self.model_config.architectures),
            # Has room for the largest trees of all request slots: gigabytes. Until: vLLM's engine
            # core sends one mask for each node, and makes room by its schedule.
            patched(model_runner, "StructuredOutputsWorker", partial(MasksOfNodes, most)),
        ):
            super().load_model(*args, **kwargs)

    def set_up_trees(self) -> None:
        """Prepares loaded models for trees; called once, before memory is profiled.

        Raises:
            ValueError: Trees cannot have a layer, or the model's inputs: see `supported_layers`
                and `refuse_own_inputs`.
        """
        refuse_own_inputs(self.model_state)
        self.speculator.allocate(self.model, self.sampler.sampling_states)
        layers = supported_layers(self.vllm_config, self.tree_backend.unsupported_attention)
        self._target_layers = [
            name for name in layers if name not in self.speculator.draft_attn_layer_names
        ]
        context = self.compilation_config.static_forward_context
        target = {name: context[name] for name in self._target_layers}
        scored = self.speculator.most_scored
        kept_bytes = self.tree_backend.keep_nodes(target, scored)
        log_added(self.model_config, self.tree.num_speculative_tokens, scored, kept_bytes)
        if kept_bytes:
            self._plain_postprocess_state = self.model_state.postprocess_state
            self.model_state.postprocess_state = self._after_commit
        # Verifies chains; ours walks down trees.
        self.rejection_sampler = TreeVerifierV2(
            self.sampler, self.speculator, SequoiaSettings.of(self.vllm_config).verification
        )
        if processors_without_trees(self.vllm_config):
            self.speculator.modes.give_no_drafts()
        # Penalties, bad words, budgets and users' own processors take the rows before a node for
        # its history. Until: vLLM's sampler is told each row's history.
        self.sampler.logits_processors = along_paths(self.sampler.logits_processors, self._tables)
        self.sampler.thinking_budget_state = PathBudgets(
            self.sampler.thinking_budget_state, self._tables.parents, self._tables.ancestors
        )
        self._plain_prepare_attn = self.model_state.prepare_attn
        # Attention metadata has no place for a tree; the class of the model's state is vLLM's
        # choice by model. Until: vLLM's metadata carries a tree mask.
        self.model_state.prepare_attn = self._attention_metadata
        if getattr(self.model_state, "rope_state", None) is not None:
            self._plain_model_inputs = self.model_state.prepare_inputs
            self.model_state.prepare_inputs = self._model_inputs

    def _after_commit(self, slots: Tensor, num_sampled: Any, *args: Any) -> None:
        """Replaces the model state's `postprocess_state`, which looks for one state per token."""
        self._plain_postprocess_state(slots, 1, *args)

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Calls vLLM's; a trial adds an estimate for the draft's graphs that it did not capture."""
        with patched(self._told, "on_trial", profile_only):
            taken: int = super().capture_model(profile_only=profile_only)
        return taken + sum(held.untried_bytes for held in self.speculator.graphs.values())

    def forget_steps(self) -> None:
        """Drops the steps so far (warm-up); from now on steps serve users."""
        self._told.serves = True
        self.take_last_paths()
        self.drafting_clock = DraftingClock(self.device)
        self.stats.reset()

    def take_last_paths(self) -> bytes:
        """Waits for what became of the latest steps' trees, for `StepStats.take_paths`."""
        self._paths.wait()
        self._observe_arrived()
        return self.stats.take_paths()

    def _observe_arrived(self) -> None:
        for paths in self._paths.arrived():
            self.stats.observe(paths)

    # -- requests ------------------------------------------------------------------

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Calls vLLM's, and tells the speculator of new and resumed requests and new blocks."""
        super().add_requests(scheduler_output)
        # vLLM names resumed requests last. New ones may have found blocks that a resumed one fills
        # in this step: it starts first, as `DraftBlocks` asks, or the draft would read them twice.
        for new in sorted(scheduler_output.scheduled_new_reqs, key=lambda r: r.num_computed_tokens):
            slot = self.req_states.req_id_to_index[new.req_id]
            self.speculator.start_request(slot, new, is_loaded(scheduler_output, new.req_id))
        if scheduler_output.scheduled_new_reqs:
            self.speculator.modes.apply_starts()
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None:
                slot = self.req_states.req_id_to_index[request_id]
                self.speculator.progress.extend(slot, blocks)

    # Until: vLLM tells the speculative method which requests have ended.
    def _remove_request(self, req_id: str) -> bool:
        """Calls vLLM's; what the user of an ended or preempted request foretold is forgotten."""
        slot = self.req_states.req_id_to_index.get(req_id)
        if slot is not None:
            self.speculator.foretold.forget(slot)
        is_known: bool = super()._remove_request(req_id)
        return is_known

    # -- before the target's forward -----------------------------------------------

    # Until: vLLM's V2 runner maps all rows of logits to adapters.
    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:
        """Calls vLLM's; adapters are told each request's rows of logits, the draft adapters."""
        batch = super().prepare_inputs(*args, **kwargs)
        if self.lora_config is not None:
            self.lora_state.expect_rows(np.diff(batch.cu_num_logits_np))
            slots = batch.idx_mapping_np
            self.speculator.drafter.note_adapters(slots, self.lora_state.lora_ids[slots])
        return batch

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        """Calls vLLM's, which computes slots from positions, then sets positions by depth."""
        prepared = super().prepare_attn(input_batch)
        self._scoring.place(input_batch)
        return prepared

    def _attention_metadata(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Replaces the model state's `prepare_attn`: adds the trees to its metadata."""
        metadata = self._layers_metadata(
            input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs
        )
        if for_capture:
            requests = input_batch.num_reqs
            nodes = input_batch.num_tokens // requests
            trees = None
            if nodes > 1:
                trees = self._scoring.trees(input_batch, requests, nodes, self.max_model_len)
        else:
            trees = self._scoring.trees_of(input_batch)
        self._trees, self._metadata = trees, metadata
        self._attach(metadata, input_batch, cudagraph_mode, for_capture)
        return metadata

    def _layers_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """vLLM's metadata of all layers; arguments as of `_attention_metadata`."""
        metadata: dict[str, Any] = self._plain_prepare_attn(*args, **kwargs)
        return metadata

    def _attach(self, metadata: dict[str, Any], *_step: Any) -> None:
        self.tree_backend.attach(self._trees, metadata, self._target_layers)

    def _model_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Replaces the model state's `prepare_inputs`: M-RoPE positions by depth, too."""
        inputs: dict[str, Any] = self._plain_model_inputs(input_batch, req_states)
        self._scoring.place(input_batch, self.model_state.rope_state.positions)
        return inputs

    # -- after it: verify and commit -------------------------------------------------

    def sample(self, hidden_states: Tensor, input_batch: InputBatch, grammar_output: Any) -> Any:
        """Calls vLLM's with our verifier as rejection sampler, then commits the accepted paths."""
        output = super().sample(hidden_states, input_batch, grammar_output)
        self._told.accepted = None
        if (trees := self._trees) is not None and input_batch.num_draft_tokens > 0:
            paths = self.rejection_sampler.paths[: trees.num_requests]
            self.tree_backend.commit(self._target_caches, self._metadata, trees, paths[:, 1:])
            self._told.accepted = paths[:, 1:]
            self._paths.start(paths, self.speculator.grew_dynamic)
        else:
            take_from_rank0(output[0].sampled_token_ids)
        self.drafting_clock.begin()
        self._observe_arrived()
        return output

    # Until: vLLM asks the speculative method which requests it drafts for.
    def take_draft_token_ids(self) -> Any:
        """Returns vLLM's drafts; requests that never draft get none."""
        drafts = super().take_draft_token_ids()
        for index, request_id in enumerate(drafts.req_ids if drafts is not None else ()):
            slot = self.req_states.req_id_to_index.get(request_id)
            if slot is not None and not self.speculator.modes.has_drafts(slot):
                drafts.draft_token_ids[index] = []
        return drafts

    @cached_property
    def _target_caches(self) -> dict[str, Tensor]:
        """Each target layer's KV cache; first read once the engine's caches exist."""
        layers = self.compilation_config.static_forward_context
        return {name: layers[name].kv_cache for name in self._target_layers}


class AdaptersOfNodes(LoraState):
    """Maps all rows of a request's logits to its adapter; vLLM's class maps one row."""

    def expect_rows(self, rows: NDArray[np.int32]) -> None:
        """Notes each request's rows of logits, int ``[requests]``; `make_lora_inputs` follows."""
        self._rows = rows

    # Until: vLLM's V2 runner maps all rows of logits to adapters.
    def make_lora_inputs(
        self,
        req_ids: list[str],
        idx_mapping: NDArray[np.int32],
        num_scheduled_tokens: NDArray[np.int32],
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        """Calls vLLM's, and repeats each request's adapter for all its rows of logits."""
        of_requests, of_tokens, active = super().make_lora_inputs(
            req_ids, idx_mapping, num_scheduled_tokens
        )
        return tuple(np.repeat(of_requests, self._rows).tolist()), of_tokens, active


def new_proposer(
    tables: TreeTables,
    backend: TreeBackend,
    told: ToldByRunner,
    vllm_config: VllmConfig,
    device: torch.device,
    req_states: RequestState,
) -> TreeProposerV2:
    """Makes the proposer, with the drafter that the engine's kind names by a dotted path."""
    kind = drafter(SequoiaSettings.of(vllm_config).drafter)
    path = kind.on_v2_for(vllm_config.speculative_config.draft_model_config.architectures)
    found = resolve_name(path)
    if not issubclass(found, TreeDrafter):
        raise TypeError(f"{path}, which drafts with {kind.name}, is not a TreeDrafter")
    chains = init_speculator(as_alone(vllm_config), device, req_states)
    return TreeProposerV2(found(chains, tables.tree, backend), req_states, tables, told)
