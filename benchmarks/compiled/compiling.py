"""Compiles variants down to machine code, and reads there what they take."""

import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.compiled.variant import Variant
from benchmarks.compiled.variants import Task, all_variants

_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Resources:
    """What a compiled variant takes."""

    name: str
    capability: int  # compute capability times ten
    registers: int
    spilled_bytes: int  # local memory per thread; 0 if all fits into registers
    shared_bytes: int


def compile_variant(variant: Variant, capability: int) -> Resources:
    """Compiles one variant down to machine code; ``capability`` is ten times the device's."""
    import triton
    from triton.backends.compiler import GPUTarget

    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    options["maxnreg"] = variant.max_registers
    compiled = triton.compile(_source(variant), GPUTarget("cuda", capability, 32), options)
    registers, spilled = _registers_and_spills(compiled.asm["cubin"])
    return Resources(variant.name, capability, registers, spilled, compiled.metadata.shared)


def compile_all(tasks: Sequence[Task], processes: int = 2) -> Iterator[Resources]:
    """Compiles variants of `all_variants`, ``processes`` at once; in order.

    One process is this one.
    """
    named = [(variant.name, capability) for variant, capability in tasks]
    if processes == 1:
        yield from map(_compile_named, named)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(_compile_named, named)


def _compile_named(task: tuple[str, int]) -> Resources:
    name, capability = task
    try:
        return compile_variant(_variants_by_name()[name], capability)
    except Exception as error:
        error.add_note(f"when compiling {name!r} for sm_{capability}")
        raise


@cache
def _variants_by_name() -> dict[str, Variant]:
    return {variant.name: variant for variant in all_variants()}


def _source(variant: Variant) -> Any:
    """What Triton's compiler takes: the kernel with signature, constants and attributes."""
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for index, name in enumerate(variant.kernel.arg_names):
        written = variant.types.get(name, "constexpr")
        signature[name], _, divisor = written.partition(":")
        aligned = not variant.kernel.params[index].do_not_specialize_on_alignment
        if divisor == "16" or (signature[name].startswith("*") and aligned):
            attributes[(index,)] = _DIVISIBLE_BY_16
    return ASTSource(variant.kernel, signature, dict(variant.constexprs), attributes)


def _registers_and_spills(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


@cache
def _cuobjdump() -> str:
    import triton

    return str(triton.knobs.nvidia.cuobjdump.path)
