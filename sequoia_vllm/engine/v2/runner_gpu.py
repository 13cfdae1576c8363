"""Model Runner V2 with trees on GPUs."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig

from sequoia_vllm.engine.settings import SequoiaSettings
from sequoia_vllm.engine.v2.backend_gpu import GPUTreeBackend
from sequoia_vllm.engine.v2.runner import TreeRunnerMixin


class SequoiaGPUModelRunner(TreeRunnerMixin):
    """vLLM's V2 runner with trees."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        ancestors = SequoiaSettings.of(vllm_config).tree.ancestor_mask
        on_device = torch.from_numpy(ancestors.copy()).to(device)
        super().__init__(vllm_config, device, GPUTreeBackend(on_device))
