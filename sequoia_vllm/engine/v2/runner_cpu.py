"""Model Runner V2 with trees on CPUs for which Triton has a driver."""

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from sequoia_vllm.engine.v2.attention.backend_cpu import CPUTreeBackend
from sequoia_vllm.engine.v2.runner import TreeRunner


class SequoiaCPUModelRunnerV2(TreeRunner, CPUModelRunner):
    """vLLM's V2 runner for CPUs with trees."""

    backend_class = CPUTreeBackend
