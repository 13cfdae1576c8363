"""How the kernels of recurrent layers are compiled: Qwen3-Next's heads, in bfloat16."""

from __future__ import annotations

import triton.language as tl

from benchmarks.compiled.variant import Variant
from sequoia_vllm.kernels import gdn_tree, gdn_tree_kernels

_HEADS = {"HEADS": 16, "VALUE_HEADS": 32, "KEY": 128, "VALUE": 128, "PART": gdn_tree._PART}
_ROWS = {
    "state_indices": "*i32", "cu_nodes": "*i32", "slots": "*i64", "slot_rows": "i32",
    "block_stride": "i32:16",
}  # fmt: skip
_KEPT = dict.fromkeys(("keys", "updates", "decays"), "*fp32")


def gdn_variants() -> list[Variant]:
    """Scoring of small and of large trees, and the commit of paths of up to 15 nodes."""
    return [_convolution(), *(_scoring(nodes) for nodes in (16, 64)), *_commits()]


def _convolution() -> Variant:
    return Variant(
        "convolve nodes",
        gdn_tree_kernels.convolve_nodes_kernel,
        {
            **dict.fromkeys(("inputs", "weights", "history", "kept", "convolved"), "*bf16"),
            **dict.fromkeys(("input_stride", "token_stride", "channels"), "i32:16"),
            **_ROWS,
            "parents": "*i32",
        },
        {
            "bias": None, "channel_stride": 1, "WIDTH": 4, "HAS_BIAS": False, "SILU": True,
            "NODES": gdn_tree._NODES, "CHANNELS": gdn_tree._CHANNELS,
        },
    )  # fmt: skip


def _scoring(nodes: int) -> Variant:
    floats = ("convolved", "a", "b", "dt_bias", "output")
    part = dict.fromkeys(("PART", "KEY_PART"), 16 if nodes > 32 else gdn_tree._PART)
    return Variant(
        f"score nodes of trees of {nodes}",
        gdn_tree_kernels.score_nodes_kernel,
        {
            **dict.fromkeys(floats, "*bf16"),
            **dict.fromkeys(("log_a", "states"), "*fp32"),
            **_ROWS,
            **_KEPT,
            **dict.fromkeys(("max_nodes", "depth"), "i32"),
            "ancestors": "*i1",
            "scale": "fp32",
        },
        {**_HEADS, **part, "NODES": nodes},
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
            gdn_tree_kernels.commit_inputs_kernel,
            {**path, "token_stride": "i32:16", "channels": "i32:16", "kept": "*bf16"},
            {
                "channel_stride": 1, "TYPE": tl.bfloat16, "WIDTH": 4, "PATH": 16,
                "CHANNELS": gdn_tree._COMMITTED_CHANNELS,
            },
        ),
        Variant(
            "commit states",
            gdn_tree_kernels.commit_states_kernel,
            {**path, **_KEPT},
            {**_HEADS, "KEY_PART": gdn_tree._COMMITTED_KEYS, "TYPE": tl.float32, "PATH": 16},
            num_stages=1,
        ),
    ]  # fmt: skip
