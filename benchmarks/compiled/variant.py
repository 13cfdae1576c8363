"""One way in which a kernel is compiled, and the devices that it is compiled for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAPABILITIES = (80, 89, 90, 100, 120)
"""Compute capabilities (times ten) that the kernels are compiled for."""

SHARED_MEMORY_LIMITS = {
    80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024,
}  # fmt: skip
"""Bytes of shared memory that one block of threads may have, if it asks for them."""


@dataclass(frozen=True)
class Variant:
    """One way a kernel is compiled.

    Attributes:
        signature: Triton type of each argument that is no constexpr, by name:
            ``"*bf16"``, ``"fp32"``, ``"i32"``, ... With ``":16"`` at its end it is a
            multiple of 16, as Triton finds for itself when a kernel is called;
            pointers without it are taken to be aligned so, as torch's memory is,
            unless the kernel is not specialised on that. Names left out that have a
            value in ``constexprs`` are constants; others than the kernel's do nothing.
        max_registers: Per thread, ``maxnreg`` of a launch.
        capabilities: Devices that it is meant for, of `CAPABILITIES`.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    capabilities: tuple[int, ...] = CAPABILITIES

    @property
    def launch(self) -> dict[str, Any]:
        """All but name and kernel: what the compiler is told, for hashing and comparing."""
        types = {name: self.signature.get(name) for name in self.kernel.arg_names}
        return {
            "signature": types,
            "constexprs": {name: str(value) for name, value in sorted(self.constexprs.items())},
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "max_registers": self.max_registers,
            "capabilities": self.capabilities,
        }
