"""vLLM's CUDA platform, whose devices are this machine's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

from gpu_stand_in import runtime

_QUESTIONS = (
    "cutlass_scaled_mm_supports_fp4", "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported",
)  # fmt: skip


class StandInPlatform(NonNvmlCudaPlatform):
    """An H100's platform, as far as vLLM's choices go; tensors are made on the CPU."""

    device_type = "cpu"
    dispatch_key = "CPU"  # vLLM's own operators are registered for CPU tensors
    dist_backend = "gloo"
    simple_compile_backend = "eager"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Nothing is compiled, and no pass asks for operators that only the GPU build has.

        Everything else is left at what users get.
        """
        config = vllm_config.compilation_config
        config.backend = "eager"
        config.custom_ops = ["none"]
        for field in dataclasses.fields(config.pass_config):
            if field.name.startswith(("fuse_", "enable_")):
                setattr(config.pass_config, field.name, False)

    @classmethod
    def import_kernels(cls) -> None:
        """Imports the CPU build's; when asked what the GPU's can do, the answer is no."""
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.import_kernels()
        for name in _QUESTIONS:
            setattr(torch.ops._C, name, lambda *_: False)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*runtime.CAPABILITY)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return runtime.NAME

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return runtime.total_memory()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "gpu_stand_in.communicator.GlooCommunicator"

    @classmethod
    def device_count(cls) -> int:
        return runtime.DEVICES

    @classmethod
    def graph_pool_handle(cls) -> Any:
        return runtime.graph_pool_handle()

    @classmethod
    def log_warnings(cls) -> None:
        """None: they are about other devices of the machine."""

    @classmethod
    def is_integrated_gpu(cls, device_id: int = 0) -> bool:
        return False

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return runtime.PROCESSORS
