"""Compiles the kernels without a GPU, and says what each takes of a processor.

``python -m sequoia_vllm.kernels.compile_report`` prints registers, spills and shared
memory of every kernel's variants for A100 (80), L4, L40 and RTX 4090 (89), H100 and
H200 (90), B200 (100) and RTX 5090 (120). It says nothing about speed, but a variant
that spills or does not fit would be slow or refused on the GPU, and is found here.

Not in a process with TRITON_INTERPRET=1: there Triton compiles nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 89, 90, 100, 120)
"""Compute capabilities (times ten) that the kernels are compiled for."""

SHARED_MEMORY_LIMITS = {
    80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024,
}  # fmt: skip
"""Bytes of shared memory that one block of threads may have, if it asks for them."""

_KERNEL_MODULES = (
    "tree_attention", "children", "commit", "verify", "begin_drafting", "draft_inputs",
    "scoring_inputs",
)  # fmt: skip
_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Variant:
    """One way a kernel is compiled.

    Attributes:
        name: Unique, for the report.
        kernel: The function, from `triton.jit`.
        signature: Triton type of each argument that is no constexpr, by name:
            ``"*bf16"``, ``"fp32"``, ``"i32"``, ... With ``":16"`` at its end it is a
            multiple of 16, as Triton finds for itself when a kernel is called;
            pointers without it are taken to be aligned so, as torch's memory is,
            unless the kernel is not specialised on that.
            Names left out that have a value in ``constexprs`` are constants.
        constexprs: Values of the arguments known when compiling, by name.
        num_warps, num_stages: As in a launch.
        max_registers: Per thread, ``maxnreg`` of a launch.
        capabilities: Devices that it is meant for, of `CAPABILITIES`.
        in_every_test: Compiled whenever tests run; the others are for the records.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    capabilities: tuple[int, ...] = CAPABILITIES
    in_every_test: bool = False


@dataclass(frozen=True)
class Resources:
    """What a compiled variant takes.

    Attributes:
        name: The variant's.
        capability: Compute capability times ten.
        registers: Per thread.
        spilled_bytes: Local memory per thread; 0 if all fits into registers.
        shared_bytes: Shared memory per block of threads.
    """

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    def line(self) -> str:
        """For people."""
        return (
            f"sm_{self.capability:<4} {self.name:77} {self.registers:4} registers"
            f" {self.spilled_bytes:5} B spilled {self.shared_bytes:7} B shared"
        )


def all_variants() -> list[Variant]:
    """The variants that the kernel modules name, in their order.

    Raises:
        ValueError: If two have the same name.
    """
    variants: list[Variant] = []
    for module in _KERNEL_MODULES:
        path = f"{__package__}.{module}"
        if importlib.util.find_spec(path) is not None:
            variants += importlib.import_module(path).aot_variants()
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"variants share a name: {sorted(names)}")
    return variants


def compile_variant(variant: Variant, capability: int) -> Resources:
    """Compiles one variant down to machine code.

    Args:
        variant: What to compile.
        capability: Compute capability times ten.

    Raises:
        RuntimeError: If TRITON_INTERPRET is set.
        triton.CompilationError: If the kernel is wrong for that device.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    source = ASTSource(variant.kernel, *_split_signature(variant))
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "maxnreg": variant.max_registers,
    }
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    registers, spilled = _registers_and_spills(compiled.asm["cubin"])
    return Resources(variant.name, capability, registers, spilled, compiled.metadata.shared)


def _split_signature(
    variant: Variant,
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Signature, constants and attributes as Triton's compiler takes them."""
    signature, attributes = {}, {}
    for index, name in enumerate(variant.kernel.arg_names):
        written = "constexpr" if name in variant.constexprs else variant.signature[name]
        signature[name], _, divisor = written.partition(":")
        aligned = not variant.kernel.params[index].do_not_specialize_on_alignment
        if divisor == "16" or (signature[name].startswith("*") and aligned):
            attributes[(index,)] = _DIVISIBLE_BY_16
    return signature, dict(variant.constexprs), attributes


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


def compile_all(tasks: Sequence[tuple[Variant, int]], processes: int = 2) -> Iterator[Resources]:
    """Compiles variants, each for a capability (times ten), ``processes`` at once; in order."""
    named = [(variant.name, capability) for variant, capability in tasks]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(_compile_named, named)


def tasks_of(
    capabilities: Sequence[int] = CAPABILITIES, pattern: str = "", in_every_test: bool = False
) -> list[tuple[Variant, int]]:
    """Every variant with every capability that it is meant for.

    Args:
        capabilities: No others.
        pattern: Only variants in whose name this regular expression is found.
        in_every_test: Only those that are marked so.
    """
    return [
        (variant, capability)
        for variant in all_variants()
        for capability in capabilities
        if capability in variant.capabilities
        and re.search(pattern, variant.name)
        and (variant.in_every_test or not in_every_test)
    ]


def record(table: Sequence[Resources], triton_version: str) -> str:
    """The table as a page of tests/kernels/compiled."""
    lines = "\n".join(row.line() for row in table)
    return f"""# The GPU kernels, compiled with Triton {triton_version}

Registers per thread, bytes spilled and shared memory per program, from
`python -m sequoia_vllm.kernels.compile_report`: see [the other files here](README.md).

```
{lines}
```
"""


def main() -> None:
    """Prints the table, and writes it where the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, prog=__spec__.name if __spec__ else None)
    parser.add_argument("--json", type=Path, help="file to write the table to")
    parser.add_argument(
        "--record", type=Path, help="folder for a page named after Triton's version"
    )
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression for variants' names")
    parser.add_argument("--in-every-test", action="store_true", help="what tests compile")
    arguments = parser.parse_args()
    tasks = tasks_of(arguments.capabilities, arguments.only, arguments.in_every_test)
    table = []
    for row in compile_all(tasks, arguments.processes):
        print(row.line(), flush=True)
        table.append(row)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in table], indent=1) + "\n")
    if arguments.record is not None:
        version = importlib.metadata.version("triton")
        path = arguments.record / f"triton-{version}.md"
        path.write_text(record(table, version))


if __name__ == "__main__":
    main()
