"""Model Runner V2 with trees on CPUs: where Triton has a CPU driver."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from sequoia_vllm.engine.settings import SequoiaSettings
from sequoia_vllm.engine.v2.backend_cpu import CPUTreeBackend
from sequoia_vllm.engine.v2.runner import TreeRunnerMixin


class SequoiaCPUModelRunnerV2(TreeRunnerMixin, CPUModelRunner):
    """vLLM's V2 runner for CPUs with trees."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        ancestors = SequoiaSettings.of(vllm_config).tree.ancestor_mask
        super().__init__(vllm_config, device, CPUTreeBackend(torch.from_numpy(ancestors.copy())))
