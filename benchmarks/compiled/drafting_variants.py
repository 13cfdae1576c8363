"""How the kernels of a drafting pass are compiled for large vocabularies."""

import triton

from benchmarks.compiled.variant import Variant
from sequoia_vllm.kernels import (
    begin_drafting,
    children,
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
    int32 = (
        "requests", "computed", "num_sampled", "bounds", "seq_lens", "query_start_loc", "all_modes",
        "most_nodes", "read", "num_nodes", "rows", "starts", "counts", "first_rows",
        "computed_before", "roots", "contexts", "modes", "all_top_k", "top_k",
    )  # fmt: skip
    floats = ("all_temperatures", "temperatures", "all_top_p", "top_p", "all_min_p", "min_p")
    numbers = (
        "num_requests", "max_requests", "tree_size", "rows_per_tree", "longest", "max_trees",
        "state_offset",
    )  # fmt: skip
    signature = {
        **dict.fromkeys(int32, "*i32"),
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("all_seeds", "slots", "seeds", "last_rows"), "*i64"),
        **dict.fromkeys(numbers, "i32"),
    }
    constants = {"BLOCK": begin_drafting.REQUESTS_AT_ONCE}
    kernel = begin_drafting.begin_drafting_kernel
    return [Variant("begin drafting", kernel, signature, constants, num_warps=8)]


def draft_input_variants() -> list[Variant]:
    """One and two groups of cache layers."""
    int32 = (
        "starts", "first_rows", "computed_before", "contexts", "roots", "nodes", "token_ids",
        "all_token_ids",
    )  # fmt: skip
    int64 = ("requests", "tokens", "layout", "positions", "slots")
    numbers = (
        "ids_stride", "max_len", "num_requests", "steps", "width", "num_rows", "longest",
        "state_offset", "tokens_stride", "first", "depth", "mask_token", "slot_rows",
    )  # fmt: skip
    signature = {
        **dict.fromkeys(int32, "*i32"), **dict.fromkeys(int64, "*i64"),
        **dict.fromkeys(numbers, "i32"), "slots_stride": "i32:16",
    }  # fmt: skip
    return [
        Variant(
            f"draft inputs, {name}, {groups} groups",
            kernel,
            signature,
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
    signature = {
        **dict.fromkeys(("texts", "roots"), "*i32"),
        **dict.fromkeys(("slots", "told"), "*i64"),
        **dict.fromkeys(("texts_stride", "length", "depth", "window"), "i32"),
    }
    block = continuations._BLOCK
    constants = {"MOST": LONGEST, "LEAST": SHORTEST, "BLOCK": block, "COLUMNS": 8}
    kernel = continuations.continuations_kernel
    return [Variant("continuations", kernel, signature, constants, num_warps=continuations._WARPS)]


def target_state_variants() -> list[Variant]:
    """Three layers' states, as EAGLE-3 heads read them, and eight."""
    layers = [f"layer_{number}" for number in range(target_states._MOST_LAYERS)]
    int32 = ("query_start_loc", "accepted", "first_rows")
    numbers = ("num_requests", "steps", "accepted_stride", "trees", "depth")
    signature = {
        **dict.fromkeys((*layers, "states"), "*bf16"), **dict.fromkeys(int32, "*i32"),
        **dict.fromkeys(numbers, "i32"),
        **dict.fromkeys(("layer_stride", "states_stride", "hidden"), "i32:16"),
    }  # fmt: skip
    return [
        Variant(
            f"target states, {count} layers",
            target_states.gather_target_states_kernel,
            signature,
            {"LAYERS": count, "BLOCK": target_states._BLOCK},
        )
        for count in (3, target_states._MOST_LAYERS)
    ]


def truncation_variants() -> list[Variant]:
    """What finds where a row's nucleus ends."""
    bins = {"BINS": truncation._BINS}
    signature = {"num_blocks": "i32:16", "found": "*fp32"}
    return [
        *(
            Variant(
                f"nucleus counts {dtype}",
                truncation.count_bins_kernel,
                {**_draw_signature(dtype), "counts": "*i32"},
                {**bins, "BLOCK": truncation._BLOCK},
                num_warps=truncation._COUNTING_WARPS,
            )
            for dtype in ("bf16", "fp32")
        ),
        Variant(
            "nucleus end, 151936 tokens",
            truncation.lowest_inside_kernel,
            {**_draw_signature("bf16"), "counts": "*i32", **signature},
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
    block, num_blocks = children._blocks(vocabulary, branch)
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
            (block_best_kernel, {"BLOCK": block, **sizes}, children._BEST_WARPS),
            (merge_best_kernel, sizes, children._merge_warps(sizes["BLOCKS"] * branch)),
        )
    ]


def _draw_signature(dtype: str) -> dict[str, str]:
    numbers = (
        "width", "depth", "vocabulary", "num_state_rows", "num_blocks", "max_children", "slot_rows",
        "told_columns",
    )  # fmt: skip
    floats = ("temperature", "top_p", "min_p", "lowest", "found", "partials", "draft_stats")
    integers = (
        "top_k", "modes", "positions", "nodes", "counts", "columns", "state_rows", "inner_rows",
    )  # fmt: skip
    multiples = ("logits_stride", "draft_state_stride", "draft_inner_stride")
    strides = ("stats_state_stride", "stats_inner_stride", "tokens_stride")
    return {
        **dict.fromkeys(("logits", "draft_logits"), f"*{dtype}"),
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("seeds", "candidates", "tokens", "slots", "told"), "*i64"),
        **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(numbers, "i32"),
        **dict.fromkeys(multiples, "i64:16"),
        **dict.fromkeys(strides, "i64"),
    }
