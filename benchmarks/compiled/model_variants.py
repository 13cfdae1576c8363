"""How the kernels of the GPU check's models are compiled; no engine has them, no page either."""

from __future__ import annotations

from benchmarks.compiled.variant import Variant
from benchmarks.gpu.check import model_kernels


def model_variants() -> list[Variant]:
    """What a 7B-shaped model compiles."""
    tensors = ("hidden", "residual", "weight", "output", "packed", "cache")
    numbers = ("width", "block_stride", "head_stride", "slot_stride")
    signature = {
        **dict.fromkeys(tensors, "*bf16"),
        **dict.fromkeys(numbers, "i32"),
        **dict.fromkeys(("positions", "slots"), "*i64"),
        "rotation": "*fp32",
        "epsilon": "fp32",
    }
    heads = {"HEADS": 32, "KEY_HEADS": 8, "HEAD_SIZE": 128, "HALF": 64, "PADDED_HALF": 64}
    return [
        Variant(
            f"{kernel.__name__}/{number}", kernel, signature, constexprs, num_warps=num_warps
        )
        for number, (kernel, constexprs, num_warps) in enumerate((
            (model_kernels._normalize_kernel, {"ADD": True, "BLOCK": 4096}, 4),
            (model_kernels._normalize_kernel, {"ADD": False, "BLOCK": 1024}, 4),
            (model_kernels._rotate_and_store_kernel, {**heads, "SLOTS": 16}, 1),
            (model_kernels._gate_kernel, {"BLOCK": 1024}, 4),
        ))
    ]  # fmt: skip
