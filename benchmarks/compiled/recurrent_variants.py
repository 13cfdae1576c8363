"""How the kernels of recurrent layers are compiled, in bfloat16, with published models' heads."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from benchmarks.compiled.variant import Variant
from sequoia_vllm.kernels import recurrent_heads, recurrent_tree, recurrent_tree_kernels

# Qwen3-Next's, and those of Granite 4 Small.
_GDN = {"HEADS": 16, "VALUE_HEADS": 32, "KEY": 128, "VALUE": 128}
_MAMBA = {"HEADS": 1, "VALUE_HEADS": 128, "KEY": 128, "VALUE": 64}


def recurrent_variants() -> list[Variant]:
    """Scoring of small and of large trees, and the commit of paths of up to 15 nodes."""
    mamba = {"a": "*fp32"}
    return [
        Variant(
            "convolve nodes",
            recurrent_tree_kernels.convolve_nodes_kernel,
            constexprs={
                "bias": None, "channel_stride": 1, "WIDTH": 4, "HAS_BIAS": False, "SILU": True,
                "NODES": recurrent_tree._NODES, "CHANNELS": recurrent_tree._CHANNELS,
            },
        ),
        *(_scoring("score nodes", recurrent_heads.score_gdn_kernel, {}, _GDN, n) for n in (16, 64)),
        *(
            _scoring("score nodes of Mamba2", recurrent_heads.score_mamba_kernel, mamba, _MAMBA, n)
            for n in (16, 64)
        ),
        Variant(
            "commit inputs",
            recurrent_tree_kernels.commit_inputs_kernel,
            constexprs={
                "channel_stride": 1, "TYPE": tl.bfloat16, "WIDTH": 4, "PATH": 16,
                "CHANNELS": recurrent_tree._COMMITTED_CHANNELS,
            },
        ),
        Variant(
            "commit states",
            recurrent_tree_kernels.commit_states_kernel,
            constexprs={
                **_GDN, "KEY_PART": recurrent_tree._COMMITTED_KEYS, "TYPE": tl.float32,
                "PATH": 16, "PART": 32,
            },
            num_stages=1,
        ),
    ]  # fmt: skip


def _scoring(
    name: str, kernel: Any, inputs: dict[str, str], heads: dict[str, int], nodes: int
) -> Variant:
    part = dict.fromkeys(("PART", "KEY_PART"), 16 if nodes > 32 else recurrent_tree._KEY_PART)
    return Variant(
        f"{name} of trees of {nodes}",
        kernel,
        {**inputs, "states": "*fp32"},
        {**heads, **part, "NODES": nodes},
        num_warps=8 if nodes > 32 else 4,
        num_stages=1,
    )
