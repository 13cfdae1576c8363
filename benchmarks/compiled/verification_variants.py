"""How the kernels of a verified step are compiled: scoring inputs, verification, commit."""

from dataclasses import dataclass

import triton
import triton.language as tl

from benchmarks.compiled.variant import Variant
from sequoia_vllm.kernels import path_edits, scoring_inputs, target_statistics, traversal, verify
from sequoia_vllm.kernels.commit import commit_kernel
from sequoia_vllm.kernels.traversal_kernels import path_kernel, wave_kernel
from sequoia_vllm.kernels.verify_kernels import verify_kernel


def scoring_input_variants() -> list[Variant]:
    """The kernels before scoring and verification, as an engine launches them."""
    int32 = (
        "row_slots", "row_nodes", "input_ids", "cu_rows", "num_nodes", "state_rows",
        "modes", "token_ids_out", "modes_out", "root_positions_out", "state_rows_out", "scored",
        "context_lens",
    )  # fmt: skip
    int64 = (
        "rows", "shifts", "positions", "seeds", "tokens_out", "positions_out", "seeds_out",
        "noted_slots", "slots",
    )  # fmt: skip
    numbers = (
        "slot_rows", "max_nodes", "axis_stride", "num_invalid", "num_rows", "num_requests",
        "scored_stride",
    )  # fmt: skip
    signature = {
        **dict.fromkeys(int32, "*i32"), **dict.fromkeys(int64, "*i64"),
        **dict.fromkeys(("temperatures", "temperatures_out"), "*fp32"),
        **dict.fromkeys(numbers, "i32"), "invalid": "*i1",
    }  # fmt: skip
    place, gather = (
        scoring_inputs.place_nodes_kernel,
        scoring_inputs.gather_for_verification_kernel,
    )
    constants = {"BLOCK": scoring_inputs._BLOCK}
    return [
        Variant("place nodes", place, signature, {"BLOCK": 64, "NOTED": True}, num_warps=1),
        Variant("gather for verification", gather, signature, constants, num_warps=4),
    ]


def path_edit_variants() -> list[Variant]:
    """Edits of float32 logits: vLLM makes such a copy before it edits."""
    rows = {
        "logits": "*fp32", "logits_stride": "i32:16",
        **dict.fromkeys(("slots", "nodes", "token_ids", "parents"), "*i32"),
    }  # fmt: skip
    int32 = (
        "prompt_bits", "output_counts", "words", "offsets", "num_words", "all_tokens",
        "prompt_lens", "total_lens",
    )  # fmt: skip
    strides = (
        "slot_rows", "bits_stride", "counts_stride", "words_stride", "offsets_stride",
        "tokens_stride",
    )  # fmt: skip
    signature = {
        **rows, **dict.fromkeys(int32, "*i32"), **dict.fromkeys(strides, "i32"),
        **dict.fromkeys(("repetition", "frequency", "presence"), "*fp32"), "vocabulary": "i32:16",
    }  # fmt: skip
    penalise, exclude = path_edits.penalise_paths_kernel, path_edits.exclude_bad_words_kernel
    return [
        Variant(
            "penalise paths", penalise, signature, {"BLOCK": path_edits._BLOCK},
            num_warps=path_edits._NUM_WARPS,
        ),
        Variant("exclude bad words", exclude, signature, {}, num_warps=1),
    ]  # fmt: skip


def target_statistics_variants() -> list[Variant]:
    """Logits of both dtypes that engines have."""
    signature = {
        "logits_stride": "i32:16", "temperatures": "*fp32", "modes": "*i32",
        "cu_num_logits": "*i32", "most_nodes": "i32", "vocabulary": "i32:16",
        "partials": "*fp32",
    }  # fmt: skip
    return [
        Variant(
            f"target statistics {target}",
            target_statistics.target_statistics_kernel,
            {"logits": f"*{target}", **signature},
            {"BLOCK": target_statistics._BLOCK.value},
            num_warps=target_statistics._NUM_WARPS,
        )
        for target in ("bf16", "fp32")
    ]


@dataclass(frozen=True)
class _Tree:
    """Powers of two that hold a tree: its nodes, children of a node, tokens that a path emits."""

    nodes: int = 64
    branches: int = 16
    columns: int = 16

    @property
    def named(self) -> str:
        return "" if self == _Tree() else f", {self.nodes} nodes"


# Such as the paper's for offloading: 768 nodes, 18 deep, with up to 32 children.
_LARGE = _Tree(nodes=1024, branches=32, columns=32)


def verify_variants() -> list[Variant]:
    """Vocabularies of models, in the dtypes of target and draft; and a large tree."""
    return [
        Variant(
            f"verify {target} target, {draft} draft, {vocabulary} tokens{tree.named}",
            verify_kernel,
            _verify_signature(target, draft),
            {"BRANCHES": tree.branches, **verify.lane_constants(vocabulary, columns=tree.columns)},
            num_warps=verify.NUM_WARPS,
        )
        for target, draft, vocabulary, tree in (
            ("fp32", "bf16", 32000, _Tree()),
            ("bf16", "bf16", 32000, _Tree()),
            ("bf16", "bf16", 32000, _LARGE),
            ("fp32", "bf16", 128256, _Tree()),
            ("bf16", "bf16", 128256, _Tree()),
            ("bf16", "bf16", 128256, _LARGE),
            ("fp32", "bf16", 151936, _Tree()),
            ("bf16", "bf16", 151936, _Tree()),
            ("fp32", "fp16", 262144, _Tree()),
        )
    ]


def traversal_variants() -> list[Variant]:
    """A wave of nodes, and the token after the accepted path."""
    variants = []
    for target, draft, vocabulary, tree in (
        ("fp32", "bf16", 32000, _Tree()), ("bf16", "bf16", 128256, _Tree()),
        ("bf16", "bf16", 128256, _LARGE), ("fp32", "fp16", 262144, _Tree()),
    ):  # fmt: skip
        name = f"{target} target, {draft} draft, {vocabulary} tokens{tree.named}"
        constants = verify.lane_constants(vocabulary, columns=tree.columns)
        shared = {
            "PARTS": triton.next_power_of_2(triton.cdiv(vocabulary, traversal._PART)),
            "BLOCKS": constants["BLOCKS"],
            "NODES": tree.nodes,
        }
        lanes = {name: constants[name] for name in ("LANES", "STEPS", "COLUMNS", "STAGES")}
        signature = _traversal_signature(target, draft)
        variants += [
            Variant(
                f"traversal wave {name}", wave_kernel, signature,
                {"PART": traversal._PART, **shared}, num_warps=traversal._NUM_WARPS,
            ),
            Variant(
                f"verify by traversal {name}", path_kernel, signature, {**shared, **lanes},
                num_warps=verify.NUM_WARPS,
            ),
        ]  # fmt: skip
    return variants


def commit_variants() -> list[Variant]:
    """Eight heads of 128 in bfloat16, and one odd layout."""
    signature = {
        "addresses": "*i64", "block_table": "*i32", "table_stride": "i64", "context_lens": "*i32",
        "accepted": "*i32", "accepted_stride": "i64", "depth": "i32",
        "block_stride": "i64:16", "head_stride": "i64:16", "slot_stride": "i64:16",
    }  # fmt: skip
    common = {"SLOTS": 16, "HEADS": 8}
    return [
        Variant(
            "commit bf16, head 128",
            commit_kernel,
            signature,
            {**common, "UNIT": tl.int64, "UNITS": 64, "BLOCK": 512},
        ),
        Variant(
            "commit fp8, head 36",
            commit_kernel,
            {**signature, "head_stride": "i64", "slot_stride": "i64"},
            {**common, "UNIT": tl.int32, "UNITS": 18, "BLOCK": 256},
        ),
    ]


def _traversal_signature(target: str, draft: str) -> dict[str, str]:
    integers = ("visits", "node_table", "decided_in", "decisions")
    numbers = ("num_visits", "wave", "num_nodes_launched", "nodes", "num_parts")
    return {
        **_verify_signature(target, draft),
        **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(numbers, "i32"),
        "states": "*fp64",
        "partials": "*fp32",
    }


def _verify_signature(target: str, draft: str) -> dict[str, str]:
    floats = ("target_temperatures", "statistics", "draft_stats", "draft_temperatures")
    integers = (
        "tokens", "cu_num_logits", "modes", "positions", "children", "inner_index", "state_rows",
        "num_sampled", "accepted",
    )  # fmt: skip
    numbers = (
        "has_statistics", "walks_sampled", "num_states", "branches", "children_stride",
        "stats_state_stride", "stats_inner_stride", "slot_rows", "columns", "sampled_stride",
        "path_columns", "accepted_stride",
    )  # fmt: skip
    multiples = ("vocabulary", "logits_stride", "draft_state_stride", "draft_inner_stride")
    return {
        "logits": f"*{target}",
        "draft_logits": f"*{draft}",
        **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(("target_tokens", "seeds", "slots", "sampled_tokens"), "*i64"),
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(multiples, "i32:16"),
        **dict.fromkeys(numbers, "i32"),
    }
