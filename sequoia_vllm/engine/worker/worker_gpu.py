"""The worker of a Sequoia engine on GPUs."""

from functools import partial
from typing import Any

from vllm.v1.worker import gpu_worker

from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.compat.contract import check_contract
from sequoia_vllm.engine.v2.warming_up import warm_up
from sequoia_vllm.engine.worker.worker_base import AgreeingWorker, SequoiaWorker


class PlainGPUWorker(AgreeingWorker):
    """Worker that decodes without drafts when every node expects speculation to be slower."""


class SequoiaGPUWorker(SequoiaWorker):
    """vLLM's GPU worker with our model runner."""

    def _make_model_runner(self) -> Any:
        """Replaces vLLM's: the V2 runner with trees."""
        from sequoia_vllm.engine.v2.runner_gpu import SequoiaGPUModelRunner

        check_contract(v2=True)
        return SequoiaGPUModelRunner(self.vllm_config, self.device)

    # Until: its warm-up has a sampled request without penalties; for statistics: never.
    def compile_or_warm_up_model(self) -> Any:
        """Warms up what vLLM's requests do not reach, then calls vLLM's.

        At its end vLLM begins to warn of kernels that are compiled late.
        """
        self.model_runner.rejection_sampler.warm_up(self.model_config.dtype)
        fewer_requests = partial(warm_up, gpu_worker.warmup_kernels)
        # Scores the largest number of drafts for max_num_seqs requests after the KV cache has taken
        # the memory: many times the logits of any scheduled step, and no smaller trees. Ours shows
        # it a runner with fewer requests, once for each size of trees. Until: vLLM's warm-up
        # follows its schedule by batch size.
        with patched(gpu_worker, "warmup_kernels", fewer_requests):
            return super().compile_or_warm_up_model()
