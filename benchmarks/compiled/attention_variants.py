"""How tree attention, and what writes its cache, are compiled for the models that we name."""

from itertools import chain

from benchmarks.compiled.variant import CAPABILITIES, Variant
from sequoia_vllm.kernels import split_plan, tree_attention
from sequoia_vllm.kernels.split_plan import plan_splits_kernel
from sequoia_vllm.kernels.tree_attention import Tile, choose_tile
from sequoia_vllm.kernels.tree_attention_kernels import (
    PLAN_COLUMNS,
    merge_splits_kernel,
    tree_attention_kernel,
)
from sequoia_vllm.kernels.write_cache import row_constants, write_cache_kernel


def attention_variants() -> list[Variant]:
    """Every tile that occurs, and the launch that merges splits.

    Groups, block sizes and mask words, which matter less, alternate among the tiles.
    """
    heads, nodes = (64, 128, 256), tree_attention._ROWS_OF_NODES
    sizes = ((16, 4, 16, 1), (32, 8, 32, 2), (64, 4, 32, 4), (128, 8, 16, 24))
    latents = ((512, "bf16"), (512, "fp8e4nv"), (256, "bf16"), (256, "fp8e4nv"))
    features = (
        (128, True, False, False), (256, True, True, False), (256, False, True, False),
        (64, True, False, True), (64, False, False, True),
    )  # fmt: skip
    shapes = [
        *(_shape("bf16", "bf16", head, *size) for head in heads for size in sizes),
        *(_shape("bf16", "bf16", head, nodes, 4, 16, 2, only_nodes=True) for head in heads),
        *(_shape("bf16", "fp8e4nv", head, rows, 8, 16, 8) for head in heads for rows in (16, 128)),
        _shape("bf16", "bf16", 96, 128, 4, 16, 8),  # padded
        _shape("fp16", "fp16", 128, 64, 1, 16, 2),
        *(_shape("fp32", "fp32", head, 16, 4, 16, 2) for head in (*heads, 512)),
        # As Gemma 4's layers without a window.
        *(
            _shape("bf16", cache, 512, rows, 8, 16, 2)
            for cache in ("bf16", "fp8e4nv")
            for rows in (16, 128)
        ),
        _shape("bf16", "bf16", 512, nodes, 8, 16, 2, only_nodes=True),
        # As MLA has it: latents of 512 channels (DeepSeek, Kimi, GLM) or 256 (Mistral), 64 more.
        *(
            _shape("bf16", cache, head, rows, 16, 64, 2, extra=64)
            for head, cache in latents
            for rows in (16, 128)
        ),
        # As Hy4's MTP layer.
        *(
            _shape("bf16", "bf16", 512, rows, 16, 64, 2, has_sinks=True, extra=64)
            for rows in (16, 128)
        ),
        # As MiMo-V2: keys of 192 channels and values of 128; most layers have windows and sinks.
        *(
            _shape("bf16", cache, 128, rows, 8, 16, 2, False, both, False, both, 64, True)
            for cache in ("bf16", "fp8e4nv")
            for both in (False, True)
            for rows in (16, 128)
        ),
        # As Mistral, Gemma 2 (heads of 256, windows in every other layer) and gpt-oss have it.
        *(
            _shape("bf16", "bf16", head, rows, 4, 16, 2, False, *has)
            for head, *has in features
            for rows in (16, 128)
        ),
    ]
    return [*chain.from_iterable(shapes), *_merge_variants(), *_plan_variants()]


def _shape(
    query: str, cache: str, head_size: int, rows: int, group: int, block_size: int, words: int,
    only_nodes: bool = False, windowed: bool = False, soft_capped: bool = False,
    has_sinks: bool = False, extra: int = 0, own_values: bool = False,
) -> list[Variant]:  # fmt: skip
    """Layers and trees to compile tree attention for: a variant per tile that some device takes.

    ``rows`` as in `choose_tile`. Launches of many rows are also planned: as beside prompts.
    """
    quantized = cache == "fp8e4nv"
    tiles: dict[Tile, list[int]] = {}
    for capability in CAPABILITIES:
        if not quantized or capability >= tree_attention._FP8_CAPABILITY:
            tile = choose_tile(
                rows, head_size, 4 if query == "fp32" else 2, capability, quantized, windowed,
                bool(extra) and not own_values, own_values,
            )  # fmt: skip
            tiles.setdefault(tile, []).append(capability)
    wide = f" + {extra}" if extra else ""
    features = {
        ", only nodes": only_nodes, ", window": windowed, ", soft cap": soft_capped,
        ", sinks": has_sinks, ", own values": own_values,
    }  # fmt: skip
    has = "".join(name for name, has in features.items() if has)
    return [
        Variant(
            name=f"tree_attention {query} on {cache}, head {head_size}{wide}/{group}, block "
            f"{block_size}, {words} words: {tile.rows} x {tile.keys}"
            + (" in 255" if tile.max_registers else "") + has + ", planned" * planned,
            kernel=tree_attention_kernel,
            signature=_signature(query, cache),
            constexprs={
                **tree_attention._shared_constants(
                    group, head_size, tile.keys, windowed, planned
                ),
                "BLOCK_SIZE": block_size, "WORDS": words, "QUANTIZED": quantized,
                "SCALES_IN_MEMORY": True, "ROWS": tile.rows, "ONLY_NODES": only_nodes,
                "SOFT_CAPPED": soft_capped, "HAS_SINKS": has_sinks, "EXTRA": extra,
                "OWN_VALUES": own_values or not extra,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            max_registers=tile.max_registers,
            capabilities=tuple(capabilities),
        )
        for tile, capabilities in tiles.items()
        for planned in (False, True)[: 1 + (rows == 128 or query == "fp32")]
    ]  # fmt: skip


def _merge_variants() -> list[Variant]:
    return [
        Variant(
            f"merge_splits head {size}{', window' * windowed}{', planned' * planned}",
            merge_splits_kernel,
            _signature("bf16", "bf16"),
            {
                **tree_attention._shared_constants(4, size, 64, windowed, planned),
                "SPLITS_AT_ONCE": tree_attention._SPLITS_AT_ONCE,
            },
        )
        for size, windowed in ((64, False), (128, True), (128, False), (256, False), (512, False))
        for planned in (False, True)
    ]


def _plan_variants() -> list[Variant]:
    constants = {
        "GROUP": 4, "ROWS": 128, "KEYS": 64, "MIN_BLOCKS": 4, "AT_ONCE": split_plan._AT_ONCE,
        "COLUMNS": PLAN_COLUMNS,
    }  # fmt: skip
    return [
        Variant(
            f"plan_splits of {requests} requests{', window' * windowed}",
            plan_splits_kernel,
            constexprs={**constants, "WINDOWED": windowed, "REQUESTS": requests},
        )
        for requests, windowed in ((64, False), (64, True), (2048, False))
    ]


def write_variants() -> list[Variant]:
    """The write of keys and values: sizes of heads, MiMo-V2's, latents, and both divisions."""
    return [
        Variant(
            f"write cache {dtype} to {cache}, {heads} heads of {size} and {value_size}"
            + ", exactly" * exact,
            write_cache_kernel,
            _signature(dtype, cache) | dict.fromkeys(("keys", "values"), f"*{dtype}"),
            {
                **row_constants(heads, size, value_size), "BLOCK_SIZE": 16, "EXACT": exact,
                "QUANTIZED": cache == "fp8e4nv",
            },
            capabilities=CAPABILITIES[cache == "fp8e4nv" :],
        )
        for dtype, cache, heads, size, value_size, exact in (
            ("bf16", "bf16", 8, 64, 64, False), ("bf16", "bf16", 8, 128, 128, False),
            ("fp16", "fp16", 4, 256, 256, False), ("fp32", "fp32", 8, 128, 128, False),
            ("bf16", "fp8e4nv", 8, 128, 128, False), ("bf16", "fp8e4nv", 8, 128, 128, True),
            ("bf16", "fp8e4nv", 4, 192, 128, False), ("bf16", "bf16", 1, 64, 512, True),
            ("bf16", "fp8e4nv", 1, 64, 512, True),
        )
    ]  # fmt: skip


def _signature(dtype: str, cache: str) -> dict[str, str]:
    return {
        **dict.fromkeys(("query", "output", "sinks"), f"*{dtype}"),
        **dict.fromkeys(("key_cache", "value_cache"), f"*{cache}"),
        "ancestors": "*i32",
    }
