"""How the kernels of recurrent layers are compiled, in bfloat16, with published models' heads."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from benchmarks.compiled.variant import Variant
from sequoia_vllm.kernels import gdn_tree, mamba_tree, recurrent_tree, recurrent_tree_kernels

# Qwen3-Next's, and those of Granite 4 Small.
_GDN = {"HEADS": 16, "VALUE_HEADS": 32, "KEY": 128, "VALUE": 128}
_MAMBA = {"HEADS": 1, "VALUE_HEADS": 128, "KEY": 128, "VALUE": 64}
_ROWS = {
    "state_indices": "*i32", "cu_nodes": "*i32", "slots": "*i64", "slot_rows": "i32",
    "block_stride": "i32:16",
}  # fmt: skip
_KEPT = dict.fromkeys(("keys", "updates", "decays"), "*fp32")


def recurrent_variants() -> list[Variant]:
    """Scoring of small and of large trees, and the commit of paths of up to 15 nodes."""
    gdn = {"a": "*bf16", "b": "*bf16", "log_a": "*fp32", "depth": "i32", "scale": "fp32"}
    mamba = {"dt": "*bf16", "d": "*bf16", "a": "*fp32", "dt_stride": "i32:16"}
    return [
        _convolution(),
        *(_scoring("score nodes", gdn_tree.score_gdn_kernel, gdn, _GDN, n) for n in (16, 64)),
        *(
            _scoring("score nodes of Mamba2", mamba_tree.score_mamba_kernel, mamba, _MAMBA, n)
            for n in (16, 64)
        ),
        *_commits(),
    ]


def _convolution() -> Variant:
    return Variant(
        "convolve nodes",
        recurrent_tree_kernels.convolve_nodes_kernel,
        {
            **dict.fromkeys(("inputs", "weights", "history", "kept", "convolved"), "*bf16"),
            **dict.fromkeys(("input_stride", "token_stride", "channels"), "i32:16"),
            **_ROWS,
            "parents": "*i32",
        },
        {
            "bias": None, "channel_stride": 1, "WIDTH": 4, "HAS_BIAS": False, "SILU": True,
            "NODES": recurrent_tree._NODES, "CHANNELS": recurrent_tree._CHANNELS,
        },
    )  # fmt: skip


def _scoring(
    name: str, kernel: Any, inputs: dict[str, str], heads: dict[str, int], nodes: int
) -> Variant:
    part = dict.fromkeys(("PART", "KEY_PART"), 16 if nodes > 32 else recurrent_tree._KEY_PART)
    return Variant(
        f"{name} of trees of {nodes}",
        kernel,
        {
            **dict.fromkeys(("convolved", "dt_bias", "output"), "*bf16"),
            **inputs,
            **_ROWS,
            **_KEPT,
            "states": "*fp32",
            "max_nodes": "i32",
            "ancestors": "*i1",
        },
        {**heads, **part, "NODES": nodes},
        num_warps=8 if nodes > 32 else 4,
        num_stages=1,
    )


def _commits() -> list[Variant]:
    path = {
        **_ROWS,
        **dict.fromkeys(("accepted", "block_table", "context_lens", "places"), "*i32"),
        **dict.fromkeys(("accepted_stride", "depth", "table_stride", "block_size"), "i32"),
        "addresses": "*i64",
        "layer_rows": "i32",
    }
    return [
        Variant(
            "commit inputs",
            recurrent_tree_kernels.commit_inputs_kernel,
            {**path, "token_stride": "i32:16", "channels": "i32:16", "kept": "*bf16"},
            {
                "channel_stride": 1, "TYPE": tl.bfloat16, "WIDTH": 4, "PATH": 16,
                "CHANNELS": recurrent_tree._COMMITTED_CHANNELS,
            },
        ),
        Variant(
            "commit states",
            recurrent_tree_kernels.commit_states_kernel,
            {**path, **_KEPT},
            {
                **_GDN, "KEY_PART": recurrent_tree._COMMITTED_KEYS, "TYPE": tl.float32,
                "PATH": 16, "PART": 32,
            },
            num_stages=1,
        ),
    ]  # fmt: skip
