"""How the kernels of a drafting pass are compiled for large vocabularies."""

import triton

from benchmarks.compiled.variant import Variant
from sequoia_vllm.drafting import drafted_trees
from sequoia_vllm.kernels import (
    begin_drafting,
    continuations,
    draft_inputs,
    target_states,
    truncation,
)
from sequoia_vllm.kernels.children_kernels import (
    block_best_kernel,
    merge_best_kernel,
    row_statistics_kernel,
)
from sequoia_vllm.verification.retrieval import LONGEST, SHORTEST


def begin_drafting_variants() -> list[Variant]:
    """The start of drafting, as an engine launches it."""
    signature = dict.fromkeys(("requests", "most_nodes", "rows"), "*i32")
    constants = {"BLOCK": begin_drafting.REQUESTS_AT_ONCE}
    kernel = begin_drafting.begin_drafting_kernel
    return [Variant("begin drafting", kernel, signature, constants, num_warps=8)]


def draft_input_variants() -> list[Variant]:
    """One and two groups of cache layers."""
    return [
        Variant(
            f"draft inputs, {name}, {groups} groups",
            kernel,
            {"tokens_stride": "i32"},
            {"GROUPS": groups, "BLOCK": draft_inputs._BLOCK},
        )
        for name, kernel in (
            ("committed", draft_inputs.committed_inputs_kernel),
            ("level", draft_inputs.level_inputs_kernel),
            ("block", draft_inputs.block_inputs_kernel),
        )
        for groups in (1, 2)
    ]


def continuation_variants() -> list[Variant]:
    """What finds out what texts say comes next."""
    block, warps = continuations._BLOCK, continuations._WARPS
    constants = {"MOST": LONGEST, "LEAST": SHORTEST, "BLOCK": block, "COLUMNS": 8}
    kernel = continuations.continuations_kernel
    return [Variant("continuations", kernel, constexprs=constants, num_warps=warps)]


def target_state_variants() -> list[Variant]:
    """Three layers' states, as EAGLE-3 heads read them, and eight."""
    layers = [f"layer_{number}" for number in range(target_states._MOST_LAYERS)]
    return [
        Variant(
            f"target states, {count} layers",
            target_states.gather_target_states_kernel,
            dict.fromkeys((*layers, "states"), "*bf16"),
            {"LAYERS": count, "BLOCK": target_states._BLOCK},
        )
        for count in (3, target_states._MOST_LAYERS)
    ]


def truncation_variants() -> list[Variant]:
    """What finds where a row's nucleus ends."""
    bins = {"BINS": truncation._BINS}
    return [
        *(
            Variant(
                f"nucleus counts {dtype}",
                truncation.count_bins_kernel,
                _draw_signature(dtype),
                {**bins, "BLOCK": truncation._BLOCK},
                num_warps=truncation._COUNTING_WARPS,
            )
            for dtype in ("bf16", "fp32")
        ),
        Variant(
            "nucleus end, 151936 tokens",
            truncation.lowest_inside_kernel,
            {**_draw_signature("bf16"), "num_blocks": "i32:16"},
            {**bins, "BLOCKS": 32},
            num_warps=truncation._MERGING_WARPS,
        ),
    ]


def children_variants() -> list[Variant]:
    """What engines with large vocabularies compile to draw children."""
    return [
        variant
        for dtype, branch, vocabulary in (
            ("bf16", 4, 128256),
            ("fp32", 4, 128256),
            ("bf16", 64, 128256),
            ("bf16", 4, 151936),
            ("bf16", 64, 151936),
        )
        for variant in _draw(dtype, branch, vocabulary)
    ]


def _draw(dtype: str, branch: int, vocabulary: int) -> list[Variant]:
    """The launches of a level, of nodes with up to ``branch`` children."""
    block, num_blocks = drafted_trees._blocks(vocabulary, branch)
    sizes = {"BLOCKS": triton.next_power_of_2(num_blocks), "BRANCH": branch}
    return [
        Variant(
            f"{kernel.fn.__name__} {dtype}, {vocabulary} tokens, {branch} children",
            kernel,
            _draw_signature(dtype),
            constexprs,
            num_warps=num_warps,
        )
        for kernel, constexprs, num_warps in (
            (row_statistics_kernel, {"BLOCK": block}, 4),
            (block_best_kernel, {"BLOCK": block, **sizes}, drafted_trees._BEST_WARPS),
            (merge_best_kernel, sizes, drafted_trees._merge_warps(sizes["BLOCKS"] * branch)),
        )
    ]


def _draw_signature(dtype: str) -> dict[str, str]:
    multiples = ("logits_stride", "draft_state_stride", "draft_inner_stride")
    return {
        **dict.fromkeys(("logits", "draft_logits"), f"*{dtype}"),
        **dict.fromkeys(("positions", "columns"), "*i32"),
        **dict.fromkeys(multiples, "i64:16"),
        **dict.fromkeys(("stats_state_stride", "stats_inner_stride"), "i64"),
        "vocabulary": "i32",
    }
