"""Model Runner V2 with trees on GPUs."""

import logging
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.offloader.base import get_offloader
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.draft_plan import depths_by_drafts
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.offload import report_offloading
from sequoia_vllm.engine.v2.attention.attention_gpu import GPUTreeForward
from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend
from sequoia_vllm.engine.v2.attention.mixed_steps import MixedSteps
from sequoia_vllm.engine.v2.attention.target_graphs import TreeGraphManager
from sequoia_vllm.engine.v2.graph_times import decode_times, time_graphs
from sequoia_vllm.engine.v2.runner import TreeRunner
from sequoia_vllm.hardware.graph_sizes import ContextRule

logger = logging.getLogger("vllm.sequoia")

# A mixed step runs in a full graph up to so many rows of prompts times the tokens that they see.
# Beyond, attention takes longer than the launches that a graph saves: our kernel reads prompts more
# slowly than FlashAttention.
_MOST_READ = 512 * 4096


class SequoiaGPUModelRunner(TreeRunner):
    """vLLM's V2 runner with trees."""

    backend_class = GPUTreeBackend
    tree_backend: GPUTreeBackend
    cudagraph_manager: TreeGraphManager | None
    _mixed_steps: MixedSteps | None = None
    _rule: ContextRule | None = None

    # Until: a backend can be chosen by the speculative method.
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's, which ends by offloading weights, then logs how many it has offloaded."""
        super().load_model(*args, **kwargs)
        report_offloading(self.model, get_offloader(), self.device, self.vllm_config.offload_config)

    # Until: vLLM captures for each range of a schedule its own batches.
    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's with our manager of the target's CUDA graphs."""
        manager = partial(
            TreeGraphManager,
            captures_mixed=self._mixed_steps is not None,
            long_from=self._rule and self._rule.rows,
        )
        # `initialize_kv_cache` builds the manager of the target's graphs by this name. Until: vLLM
        # captures for each range of a schedule its own batches.
        with patched(model_runner, "ModelCudaGraphManager", manager):
            super().initialize_kv_cache(*args, **kwargs)

    def capture_model(self, *, profile_only: bool = False) -> int:
        """See `TreeRunner.capture_model`. Engines that adapt then time the graphs."""
        taken = super().capture_model(profile_only=profile_only)
        settings = SequoiaSettings.of(self.vllm_config)
        if not profile_only and settings.adapts_as is not None:
            started, seconds = time.perf_counter(), time_graphs(self)
            self.step_times = decode_times(seconds, depths_by_drafts(self.tree))
            took = time.perf_counter() - started
            logger.info("Sequoia: timed %d CUDA graphs in %.1f s", len(seconds), took)
        return taken

    def set_up_trees(self) -> None:
        """See `TreeRunner.set_up_trees`. Then makes `MixedSteps`, if this engine can have them."""
        super().set_up_trees()
        config = self.vllm_config
        layers = self.compilation_config.static_forward_context
        impls: list[Any] = [getattr(layers[name], "impl", None) for name in self._target_layers]
        if any(getattr(impl, "attends_to_contexts", False) for impl in impls):
            rule = SequoiaSettings.of(config).context_rule
            self._rule = rule and ContextRule(*rule)
        if (
            all(isinstance(impl, GPUTreeForward) for impl in impls)  # our kernel takes all rows
            and config.parallel_config.data_parallel_size == 1
            # In Python, which a graph leaves out: images change how some models compute, and
            # connectors move keys and values between layers.
            and not self.uses_inputs_embeds
            and config.kv_transfer_config is None
        ):
            self._mixed_steps = MixedSteps(
                self.tree_backend, self._tables, impls, self.max_num_reqs
            )

    # Until: vLLM gives its manager of graphs the contexts of a step.
    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """Calls vLLM's, and tells the manager of graphs what contexts the step has."""
        state, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)
        if (graphs := self.cudagraph_manager) is not None:
            graphs.may_be_mixed = state is not None and self._reads_little(state)
            graphs.is_long = state is not None and self._is_long(state)
        return state, uniform

    def _is_long(self, state: Any) -> bool:
        """Whether FlashAttention reads the contexts of a step's trees."""
        if self._rule is None or state.num_draft_tokens_np is None:
            return False
        rows = np.where(state.num_draft_tokens_np > 0, state.num_scheduled_tokens, 0)
        contexts = self.req_states.num_computed_tokens_np[state.idx_mapping_np]
        return self._rule.holds(rows.astype(np.int64), contexts.astype(np.int64))

    def _reads_little(self, state: Any) -> bool:
        """Whether a step's prompts are short enough for a graph of a mixed step."""
        rows, drafts = state.num_scheduled_tokens, state.num_draft_tokens_np
        ends = self.req_states.num_computed_tokens_np[state.idx_mapping_np].astype(int) + rows
        reads = rows > 1 if drafts is None else (rows > 1) & (drafts == 0)
        return bool((rows * ends)[reads].sum() <= _MOST_READ)

    def _layers_metadata(
        self, batch: InputBatch, mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """See `TreeRunner._layers_metadata`. In the graph of a mixed step block tables alone."""
        if kwargs.get("for_capture") or not self._is_mixed(mode):
            return super()._layers_metadata(batch, mode, *args, **kwargs)
        tables, _, groups, *_ = args
        metadata: dict[str, Any] = {}
        for table, alike in zip(tables, groups, strict=True):
            for group in alike:
                metadata |= dict.fromkeys(group.layer_names, SimpleNamespace(block_table=table))
        return metadata

    def _is_mixed(self, mode: CUDAGraphMode) -> bool:
        graphs = self.cudagraph_manager
        return graphs is not None and graphs.is_mixed and mode == CUDAGraphMode.FULL

    def _attach(
        self, metadata: dict[str, Any], batch: InputBatch, mode: CUDAGraphMode, for_capture: bool
    ) -> None:
        """See `TreeRunner._attach`. In the graph of a mixed step our kernel has all rows."""
        steps, graphs, layers = self._mixed_steps, self.cudagraph_manager, self._target_layers
        if self._trees is not None and graphs is not None and graphs.is_long:
            self._trees = replace(self._trees, by_flash=True)
        if steps is None or graphs is None:
            super()._attach(metadata, batch, mode, for_capture)
        elif for_capture and (batch.max_query_len or 0) * batch.num_reqs > batch.num_tokens:
            steps.prepare_capture(batch, metadata, layers, self.max_model_len)
        elif self._is_mixed(mode):
            steps.place(batch, metadata, layers)
        else:
            super()._attach(metadata, batch, mode, for_capture)
