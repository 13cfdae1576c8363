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
    place = scoring_inputs.place_nodes_kernel
    gather = scoring_inputs.gather_for_verification_kernel
    constants = {"BLOCK": 64, "NOTED": True}
    return [
        Variant("place nodes", place, constexprs=constants, num_warps=1),
        Variant("gather for verification", gather, constexprs={"BLOCK": scoring_inputs._BLOCK}),
    ]


def path_edit_variants() -> list[Variant]:
    """Edits of float32 logits: vLLM makes such a copy before it edits."""
    penalise, exclude = path_edits.penalise_paths_kernel, path_edits.exclude_bad_words_kernel
    signature = {"logits": "*fp32", "slots": "*i32", "tokens_stride": "i32"}
    constants, warps = {"BLOCK": path_edits._BLOCK}, path_edits._NUM_WARPS
    return [
        Variant("penalise paths", penalise, signature, constants, num_warps=warps),
        Variant("exclude bad words", exclude, signature, num_warps=1),
    ]


def target_statistics_variants() -> list[Variant]:
    """Logits of both dtypes that engines have."""
    return [
        Variant(
            f"target statistics {target}",
            target_statistics.target_statistics_kernel,
            {"logits": f"*{target}"},
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
    strides = dict.fromkeys(("table_stride", "accepted_stride"), "i64")
    signature = {**strides, "block_stride": "i64:16"}
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
    return {**_verify_signature(target, draft), "nodes": "i32", "states": "*fp64"}


def _verify_signature(target: str, draft: str) -> dict[str, str]:
    dtypes = {"logits": f"*{target}", "draft_logits": f"*{draft}"}
    return {**dtypes, "tokens": "*i32", "positions": "*i32"}
