"""The driver half of the backend: names a device and a target, launches nothing."""

import os

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import Benchmarker, DriverBase


class InterpreterDriver(DriverBase):
    """Active exactly when kernels are interpreted, so that it never hides a real driver."""

    @classmethod
    def is_active(cls) -> bool:
        return os.environ.get("TRITON_INTERPRET") == "1"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "interpreter", 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("no launcher is compiled for interpreted kernels")

    def get_benchmarker(self) -> Benchmarker:
        from triton.testing import do_bench

        return do_bench
