"""Test only: vLLM's Ray executor on CPUs, where vLLM refuses it; run by vLLM in every process."""


def register() -> None:
    """Names Ray's resource for CPUs and swaps the executor; may run more than once.

    Nothing else of vLLM or of the plugin under test is touched: the workers
    start, are spoken to and end as on GPUs.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor import ray_executor_v2

    from vllm_ray_on_cpu.executor import RayExecutorOnCpu

    CpuPlatform.ray_device_key = "CPU"
    ray_executor_v2.RayExecutorV2 = RayExecutorOnCpu
