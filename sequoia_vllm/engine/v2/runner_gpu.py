"""Model Runner V2 with trees on GPUs."""

from __future__ import annotations

from sequoia_vllm.engine.v2.backend_gpu import GPUTreeBackend
from sequoia_vllm.engine.v2.runner import TreeRunnerMixin


class SequoiaGPUModelRunner(TreeRunnerMixin):
    """vLLM's V2 runner with trees."""

    backend_class = GPUTreeBackend
