"""The worker of a Sequoia engine on GPUs."""

from __future__ import annotations

from typing import Any

from sequoia_vllm.engine.contract import check_contract
from sequoia_vllm.engine.worker_base import SequoiaWorker


class SequoiaGPUWorker(SequoiaWorker):
    """vLLM's GPU worker with our model runner."""

    def _make_model_runner(self) -> Any:
        """Replaces vLLM's: the V2 runner with trees."""
        from sequoia_vllm.engine.v2.runner_gpu import SequoiaGPUModelRunner

        check_contract(v2=True)
        return SequoiaGPUModelRunner(self.vllm_config, self.device)
