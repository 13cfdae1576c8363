"""The compiler half of the backend: present because Triton asks for one, never used."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    """Compiles nothing: under ``TRITON_INTERPRET=1`` kernels are run as Python."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict) -> object:
        raise NotImplementedError("kernels are interpreted, not compiled: set TRITON_INTERPRET=1")

    def add_stages(self, stages: dict, options: object, language: Any) -> None:
        raise NotImplementedError("kernels are interpreted, not compiled: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
