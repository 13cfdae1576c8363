"""The worker of a Sequoia engine on CPUs."""

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu import model_runner as cpu_model_runner_v2

from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.compat.contract import check_contract
from sequoia_vllm.engine.offload.disk import OffloadingCPUWorker
from sequoia_vllm.engine.worker.worker_base import AgreeingWorker, SequoiaWorker


class PlainCPUWorker(AgreeingWorker, OffloadingCPUWorker):
    """Worker that decodes without drafts when every node expects speculation to be slower."""


class SequoiaCPUWorker(SequoiaWorker, OffloadingCPUWorker):
    """vLLM's CPU worker with our model runner."""

    def init_device(self) -> None:
        """Calls vLLM's, which builds `CPUModelRunner` by that module-level name: ours meanwhile."""
        check_contract(v2=self.use_v2_model_runner)
        if self.use_v2_model_runner:
            from sequoia_vllm.engine.v2.runner_cpu import SequoiaCPUModelRunnerV2

            # CPUWorker.init_device imports the V2 runner by this name.
            with patched(cpu_model_runner_v2, "CPUModelRunner", SequoiaCPUModelRunnerV2):
                super().init_device()
            return
        from sequoia_vllm.engine.v1.runner import SequoiaCPUModelRunner

        # CPUWorker.init_device builds the runner by this name.
        with patched(cpu_worker, "CPUModelRunner", SequoiaCPUModelRunner):
            super().init_device()
