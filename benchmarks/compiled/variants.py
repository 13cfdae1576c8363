"""All variants of the engine's kernels, and those of them to compile."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import triton
import triton.language as tl

from benchmarks.compiled.attention_variants import attention_variants, write_variants
from benchmarks.compiled.variant import CAPABILITIES, Variant
from sequoia_vllm.drafting import drafted_trees, dynamic_levels
from sequoia_vllm.kernels import (
    begin_drafting,
    children_kernels,
    commit,
    draft_inputs,
    dynamic_trees,
    path_edits,
    recurrent_channels,
    recurrent_heads,
    recurrent_tree,
    recurrent_tree_kernels,
    scoring_inputs,
    target_statistics,
    told_branches,
    traversal,
    traversal_kernels,
    truncation,
    verify,
    verify_kernels,
)
from sequoia_vllm.tree import MOST_DYNAMIC_NODES
from sequoia_vllm.verification.retrieval import LONGEST, SHORTEST

Task = tuple[Variant, int]
"""A variant and the compute capability (times ten) to compile it for."""


@cache
def all_variants() -> tuple[Variant, ...]:
    """The variants of all kernels, in the order of the pages."""
    variants = (
        *attention_variants(), *write_variants(), *_children(), *_commit(), *_path_edits(),
        *_target_statistics(), *_verify(), *_traversal(), *_begin_drafting(), *_truncation(),
        *_draft_inputs(), *_target_states(), *_scoring_inputs(), *_continuations(),
        *_dynamic_trees(), *_recurrent(),
    )  # fmt: skip
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"variants share a name: {sorted(names)}")
    return variants


def variants_by_kernel() -> dict[str, list[Variant]]:
    """The variants of each kernel, by its name."""
    found: dict[str, list[Variant]] = {}
    for variant in all_variants():
        found.setdefault(variant.kernel.__name__, []).append(variant)
    return found


def all_tasks(capabilities: Sequence[int] = CAPABILITIES, pattern: str = "") -> list[Task]:
    """Every variant whose name has the pattern, with those capabilities that it is meant for."""
    return [
        (variant, capability)
        for variant in all_variants()
        for capability in capabilities
        if capability in variant.capabilities and re.search(pattern, variant.name)
    ]


def sample_tasks() -> list[Task]:
    """Each kernel once, its first variant, for the capabilities turn about."""
    return [
        (first, first.capabilities[number % len(first.capabilities)])
        for number, (first, *_) in enumerate(variants_by_kernel().values())
    ]


# -- drafting: what engines with large vocabularies compile ----------------------------


def _begin_drafting() -> list[Variant]:
    signature = dict.fromkeys(("requests", "most_nodes", "rows"), "*i32")
    constants = {"BLOCK": begin_drafting.REQUESTS_AT_ONCE}
    kernel = begin_drafting.begin_drafting_kernel
    return [Variant("begin drafting", kernel, signature, constants, num_warps=8)]


def _draft_inputs() -> list[Variant]:
    """One and two groups of cache layers."""
    kernels = {
        "committed": draft_inputs.committed_inputs_kernel,
        "level": draft_inputs.level_inputs_kernel,
        "block": draft_inputs.block_inputs_kernel,
    }
    signature, block = {"tokens_stride": "i32"}, {"BLOCK": draft_inputs._BLOCK}
    return [
        Variant(f"draft inputs, {name}, {n} groups", kernel, signature, {"GROUPS": n, **block})
        for name, kernel in kernels.items()
        for n in (1, 2)
    ]


def _continuations() -> list[Variant]:
    block, warps = begin_drafting._BLOCK, begin_drafting._WARPS
    constants = {"MOST": LONGEST, "LEAST": SHORTEST, "BLOCK": block, "COLUMNS": 8}
    kernel = begin_drafting.continuations_kernel
    return [Variant("continuations", kernel, constexprs=constants, num_warps=warps)]


def _target_states() -> list[Variant]:
    """Three layers' states, as EAGLE-3 heads read them, and eight."""
    most, kernel = draft_inputs._MOST_LAYERS, draft_inputs.gather_target_states_kernel
    signature = dict.fromkeys((*(f"layer_{number}" for number in range(most)), "states"), "*bf16")
    block = {"BLOCK": draft_inputs._STATES_BLOCK}
    return [
        Variant(f"target states, {count} layers", kernel, signature, {"LAYERS": count, **block})
        for count in (3, most)
    ]


def _truncation() -> list[Variant]:
    count, end = truncation.count_bins_kernel, truncation.lowest_inside_kernel
    blocks = {"BINS": truncation._BINS, "BLOCK": truncation._BLOCK}
    bins, warps = {"BINS": truncation._BINS, "BLOCKS": 32}, truncation._COUNTING_WARPS
    signature = {**_draw_signature("bf16"), "num_blocks": "i32:16"}
    return [
        Variant("nucleus counts bf16", count, _draw_signature("bf16"), blocks, warps),
        Variant("nucleus counts fp32", count, _draw_signature("fp32"), blocks, warps),
        Variant("nucleus end, 151936 tokens", end, signature, bins, truncation._MERGING_WARPS),
    ]


def _children() -> list[Variant]:
    """The launches of a level, of nodes with up to ``branch`` children."""
    kernels, variants = children_kernels, []
    for dtype, branch, vocabulary in (
        ("bf16", 4, 128256), ("fp32", 4, 128256), ("bf16", 64, 128256), ("bf16", 4, 151936),
        ("bf16", 64, 151936),
    ):  # fmt: skip
        block, num_blocks = drafted_trees._blocks(vocabulary, branch)
        sizes = {"BLOCKS": triton.next_power_of_2(num_blocks), "BRANCH": branch}
        merge_warps = drafted_trees._merge_warps(sizes["BLOCKS"] * branch)
        what, signature = f"{dtype}, {vocabulary} tokens, {branch} children", _draw_signature(dtype)
        variants += [
            Variant(f"{kernel.fn.__name__} {what}", kernel, signature, constexprs, warps)
            for kernel, constexprs, warps in (
                (kernels.row_statistics_kernel, {"BLOCK": block}, 4),
                (kernels.block_best_kernel, {"BLOCK": block, **sizes}, drafted_trees._BEST_WARPS),
                (kernels.merge_best_kernel, sizes, merge_warps),
            )
        ]
    return variants


def _draw_signature(dtype: str) -> dict[str, str]:
    multiples = ("logits_stride", "draft_state_stride", "draft_inner_stride")
    return {
        **dict.fromkeys(("logits", "draft_logits"), f"*{dtype}"),
        **dict.fromkeys(("positions", "columns"), "*i32"),
        **dict.fromkeys(multiples, "i64:16"),
        **dict.fromkeys(("stats_state_stride", "stats_inner_stride"), "i64"),
        "vocabulary": "i32",
    }


# -- scoring inputs, verification, commit ------------------------------------------------


def _scoring_inputs() -> list[Variant]:
    place = scoring_inputs.place_nodes_kernel
    gather = scoring_inputs.gather_for_verification_kernel
    constants = {"BLOCK": 64, "NOTED": True}
    return [
        Variant("place nodes", place, constexprs=constants, num_warps=1),
        Variant("gather for verification", gather, constexprs={"BLOCK": scoring_inputs._BLOCK}),
    ]


def _path_edits() -> list[Variant]:
    """Edits of float32 logits: vLLM makes such a copy before it edits."""
    penalise, exclude = path_edits.penalise_paths_kernel, path_edits.exclude_bad_words_kernel
    signature = {"logits": "*fp32", "slots": "*i32", "tokens_stride": "i32"}
    constants, warps = {"BLOCK": path_edits._BLOCK}, path_edits._NUM_WARPS
    return [
        Variant("penalise paths", penalise, signature, constants, num_warps=warps),
        Variant("exclude bad words", exclude, signature, num_warps=1),
    ]


def _target_statistics() -> list[Variant]:
    kernel, warps = target_statistics.target_statistics_kernel, target_statistics._NUM_WARPS
    block = {"BLOCK": target_statistics._BLOCK.value}
    return [
        Variant(f"target statistics {dtype}", kernel, {"logits": f"*{dtype}"}, block, warps)
        for dtype in ("bf16", "fp32")
    ]


# Powers of two that hold a tree: its nodes, children of a node, tokens that a path emits.
_USUAL = (64, 16, 16)
# Such as the paper's for offloading: 768 nodes, 18 deep, with up to 32 children.
_LARGE = (1024, 32, 32)


def _named(target: str, draft: str, vocabulary: int, tree: tuple[int, int, int]) -> str:
    large = "" if tree == _USUAL else f", {tree[0]} nodes"
    return f"{target} target, {draft} draft, {vocabulary} tokens{large}"


def _verify() -> list[Variant]:
    """Vocabularies of models, in the dtypes of target and draft; and a large tree."""
    variants = []
    for target, draft, vocabulary, tree in (
        ("fp32", "bf16", 32000, _USUAL), ("bf16", "bf16", 32000, _USUAL),
        ("bf16", "bf16", 32000, _LARGE), ("fp32", "bf16", 128256, _USUAL),
        ("bf16", "bf16", 128256, _USUAL), ("bf16", "bf16", 128256, _LARGE),
        ("fp32", "bf16", 151936, _USUAL), ("bf16", "bf16", 151936, _USUAL),
        ("fp32", "fp16", 262144, _USUAL),
    ):  # fmt: skip
        name = f"verify {_named(target, draft, vocabulary, tree)}"
        constants = {"BRANCHES": tree[1], **verify.lane_constants(vocabulary, columns=tree[2])}
        kernel, signature = verify_kernels.verify_kernel, _verify_signature(target, draft)
        variants.append(Variant(name, kernel, signature, constants, verify.NUM_WARPS))
    return variants


def _traversal() -> list[Variant]:
    """A wave of nodes, and the token after the accepted path."""
    variants = []
    for target, draft, vocabulary, tree in (
        ("fp32", "bf16", 32000, _USUAL), ("bf16", "bf16", 128256, _USUAL),
        ("bf16", "bf16", 128256, _LARGE), ("fp32", "fp16", 262144, _USUAL),
    ):  # fmt: skip
        name = _named(target, draft, vocabulary, tree)
        parts = triton.next_power_of_2(triton.cdiv(vocabulary, traversal._PART))
        lanes = verify.lane_constants(vocabulary, columns=tree[2])
        path = {"PARTS": parts, "NODES": tree[0], **lanes}
        wave = {"PART": traversal._PART, **{key: path[key] for key in ("PARTS", "NODES", "BLOCKS")}}
        signature = {**_verify_signature(target, draft), "nodes": "i32", "states": "*fp64"}
        kernels, warps = traversal_kernels, traversal._NUM_WARPS
        variants += [
            Variant(f"traversal wave {name}", kernels.wave_kernel, signature, wave, warps),
            Variant(
                f"verify by traversal {name}",
                kernels.path_kernel,
                signature,
                path,
                verify.NUM_WARPS,
            ),
        ]
    return variants


def _verify_signature(target: str, draft: str) -> dict[str, str]:
    dtypes = {"logits": f"*{target}", "draft_logits": f"*{draft}"}
    return {**dtypes, "tokens": "*i32", "positions": "*i32"}


def _commit() -> list[Variant]:
    """Eight heads of 128 in bfloat16, and one odd layout."""
    signature = {"table_stride": "i64", "accepted_stride": "i64", "block_stride": "i64:16"}
    odd = {**signature, "head_stride": "i64", "slot_stride": "i64"}
    common: dict[str, Any] = {"SLOTS": 16, "HEADS": 8}
    usual = {**common, "UNIT": tl.int64, "UNITS": 64, "BLOCK": 512}
    small = {**common, "UNIT": tl.int32, "UNITS": 18, "BLOCK": 256}
    return [
        Variant("commit bf16, head 128", commit.commit_kernel, signature, usual),
        Variant("commit fp8, head 36", commit.commit_kernel, odd, small),
    ]


def _dynamic_trees() -> list[Variant]:
    """The choice of trees from drafts of 151,936 tokens, and their tables; the largest, too."""
    kernels, (_, blocks) = dynamic_trees, drafted_trees._blocks(151936, dynamic_levels.CHILDREN)
    read = {
        **dict.fromkeys(("nodes", "next_nodes", "node_at", "tree_parents", "given"), "*i32"),
        **dict.fromkeys(("next_parents", "drafted"), "*i64"), "values": "*fp32",
        **dict.fromkeys(("num_words", "num_nodes", "num_candidates", "first_column"), "i32"),
        **dict.fromkeys(("next_width", "inner", "drafted_stride", "parents_stride"), "i32"),
        "branch": "i32", "width": "i32",
    }  # fmt: skip
    chosen = {"CHILDREN": dynamic_levels.CHILDREN, "BLOCKS": triton.next_power_of_2(blocks)}
    variants = []
    for nodes in (64, MOST_DYNAMIC_NODES):
        best = dynamic_levels.best_constants(nodes * dynamic_levels.CHILDREN)
        words, warps = nodes // 32, best.pop("num_warps")
        tables = {"WIDTH": nodes, "NODES": triton.next_power_of_2(nodes)}
        variants += [
            Variant(
                f"choose nodes of {nodes}", kernels.choose_nodes_kernel,
                {**read, "logits": "*bf16"}, {**chosen, "LANES": 64, "WORDS": words},
            ),
            Variant(f"best {nodes} nodes", kernels.best_nodes_kernel, read, best, warps),
            Variant(
                f"tables of {nodes} nodes", kernels.write_trees_kernel, read, tables,
                dynamic_levels.TABLE_WARPS,
            ),
            Variant(
                f"branches of {nodes} nodes", told_branches.branches_kernel,
                {**read, "rows": "*i32", "num_nodes": "*i32"}, {"NODES": nodes}, 1,
            ),
        ]  # fmt: skip
    return variants


# -- recurrent layers, in bfloat16 -------------------------------------------------------

# Heads of Qwen3-Next, of Granite 4 Small, and of Kimi Linear.
_GDN = {"HEADS": 16, "VALUE_HEADS": 32, "KEY": 128, "VALUE": 128}
_MAMBA = {"HEADS": 1, "VALUE_HEADS": 128, "KEY": 128, "VALUE": 64}
_KDA = {"HEADS": 32, "VALUE_HEADS": 32, "KEY": 128, "VALUE": 128}


def _recurrent() -> list[Variant]:
    """Scoring of small and of large trees, and the commit of paths of up to 15 nodes."""
    gdn, mamba = recurrent_heads.score_gdn_kernel, recurrent_heads.score_mamba_kernel
    convolve: dict[str, Any] = {
        "bias": None, "channel_stride": 1, "WIDTH": 4, "HAS_BIAS": False, "SILU": True,
        "NODES": recurrent_tree._NODES, "CHANNELS": recurrent_tree._CHANNELS,
    }  # fmt: skip
    inputs: dict[str, Any] = {
        "channel_stride": 1, "TYPE": tl.bfloat16, "WIDTH": 4, "PATH": 16,
        "CHANNELS": recurrent_tree._COMMITTED_CHANNELS,
    }  # fmt: skip
    states: dict[str, Any] = {
        **_GDN, "KEY_PART": recurrent_tree._COMMITTED_KEYS, "TYPE": tl.float32, "PATH": 16,
        "PART": 32,
    }  # fmt: skip
    kernels, channels = recurrent_tree_kernels, recurrent_channels
    relate: dict[str, Any] = {
        "HEADS": 32, "KEY": 128, "VALUES": 32 * 128, "HAS_BOUND": False,
        "ROWS": channels.ROWS_AT_ONCE,
    }  # fmt: skip
    of_bias, kda = {"dt_bias": "*fp32"}, channels.score_kda_kernel
    return [
        Variant("convolve nodes", kernels.convolve_nodes_kernel, constexprs=convolve),
        *(_scoring("score nodes", gdn, {}, _GDN, n) for n in (16, 64)),
        *(_scoring("score nodes of Mamba2", mamba, {"a": "*fp32"}, _MAMBA, n) for n in (16, 64)),
        Variant("relate nodes", channels.relate_nodes_kernel, of_bias, relate),
        *(_scoring("score nodes of Kimi Delta Attention", kda, {}, _KDA, n) for n in (16, 64)),
        Variant("commit inputs", kernels.commit_inputs_kernel, constexprs=inputs),
        Variant("commit states", kernels.commit_states_kernel, constexprs=states, num_stages=1),
        Variant(
            "commit states by channel",
            kernels.commit_channels_kernel,
            constexprs={**states, **_KDA},
            num_stages=1,
        ),
    ]


def _scoring(
    name: str, kernel: Any, inputs: dict[str, str], heads: dict[str, int], nodes: int
) -> Variant:
    part = dict.fromkeys(("PART", "KEY_PART"), 16 if nodes > 32 else recurrent_tree._KEY_PART)
    constants, signature = {**heads, **part, "NODES": nodes}, {**inputs, "states": "*fp32"}
    warps, registers = (8, None) if nodes > 32 else (4, recurrent_tree.REGISTERS)
    return Variant(f"{name} of trees of {nodes}", kernel, signature, constants, warps, 1, registers)
