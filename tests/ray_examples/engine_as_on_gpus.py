"""Ray Serve's engine for replicas on CPUs, configured in another process, as it is on GPUs.

Named by ``RAYLLM_VLLM_ENGINE_CLS``, by which replicas import it.
"""

from ray.llm._internal.serve.core.configs.accelerators import CPUAccelerator
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

CPUAccelerator.requires_remote_initialization = True

__all__ = ["VLLMEngine"]
