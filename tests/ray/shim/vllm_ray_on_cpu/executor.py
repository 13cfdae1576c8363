"""`RayExecutorV2` with what it asks of GPUs answered for CPUs."""

from typing import Any

import ray
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc


class RayWorkerOnCpu(RayWorkerProc):
    """A worker actor whose rank stands for the number of its device."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Ray numbers no CPUs, and vLLM wants one device per worker."""
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]


class RayExecutorOnCpu(RayExecutorV2):
    """Places one worker on each CPU of the placement group."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        """The bundle holds the CPU; a resource named "CPU" is what Ray refuses to be asked for."""
        return {"num_gpus": 0}


# The executor makes its actors of this module-level name.
ray_executor_v2.RayWorkerProc = RayWorkerOnCpu
