"""Model Runner V2 with trees on GPUs."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.offloader.base import get_offloader
from vllm.v1.worker.gpu import model_runner

from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.offload import report_offloading
from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend
from sequoia_vllm.engine.v2.attention.target_graphs import TreeGraphManager
from sequoia_vllm.engine.v2.runner import TreeRunner


class SequoiaGPUModelRunner(TreeRunner):
    """vLLM's V2 runner with trees."""

    backend_class = GPUTreeBackend

    # Until: a backend can be chosen by the speculative method.
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's, which ends by offloading weights, then logs how many it has offloaded."""
        super().load_model(*args, **kwargs)
        report_offloading(self.model, get_offloader(), self.device, self.vllm_config.offload_config)

    # Until: vLLM captures for each range of a schedule its own batches.
    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's with our manager of the target's CUDA graphs."""
        # `initialize_kv_cache` builds the manager of the target's graphs by this name. Until: vLLM
        # captures for each range of a schedule its own batches.
        with patched(model_runner, "ModelCudaGraphManager", TreeGraphManager):
            super().initialize_kv_cache(*args, **kwargs)
