"""How tree attention's kernels are compiled for the models that we name."""

from dataclasses import dataclass

from benchmarks.compiled.variant import CAPABILITIES, Variant
from sequoia_vllm.kernels import tree_attention
from sequoia_vllm.kernels.tree_attention import Tile, choose_tile
from sequoia_vllm.kernels.tree_attention_kernels import merge_splits_kernel, tree_attention_kernel


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
        *(_Shape("bf16", "bf16", head, *size) for head in heads for size in sizes),
        *(_Shape("bf16", "bf16", head, nodes, 4, 16, 2, only_nodes=True) for head in heads),
        *(_Shape("bf16", "fp8e4nv", head, rows, 8, 16, 8) for head in heads for rows in (16, 128)),
        _Shape("bf16", "bf16", 96, 128, 4, 16, 8),  # padded
        _Shape("fp16", "fp16", 128, 64, 1, 16, 2),
        *(_Shape("fp32", "fp32", head, 16, 4, 16, 2) for head in (*heads, 512)),
        # As Gemma 4's layers without a window.
        *(
            _Shape("bf16", cache, 512, rows, 8, 16, 2)
            for cache in ("bf16", "fp8e4nv")
            for rows in (16, 128)
        ),
        _Shape("bf16", "bf16", 512, nodes, 8, 16, 2, only_nodes=True),
        # As MLA has it: latents of 512 channels (DeepSeek, Kimi, GLM) or 256 (Mistral), 64 more.
        *(
            _Shape("bf16", cache, head, rows, 16, 64, 2, extra=64)
            for head, cache in latents
            for rows in (16, 128)
        ),
        # As Mistral, Gemma 2 (heads of 256, windows in every other layer) and gpt-oss have it.
        *(
            _Shape("bf16", "bf16", head, rows, 4, 16, 2, False, *has)
            for head, *has in features
            for rows in (16, 128)
        ),
    ]
    return [variant for shape in shapes for variant in shape.variants()] + _merge_variants()


@dataclass(frozen=True)
class _Shape:
    """Layers and trees to compile tree attention for; ``rows`` as in `choose_tile`."""

    query: str
    cache: str
    head_size: int
    rows: int
    group: int
    block_size: int
    words: int
    only_nodes: bool = False
    windowed: bool = False
    soft_capped: bool = False
    has_sinks: bool = False
    extra: int = 0

    def variants(self) -> list[Variant]:
        """One per tile that some device takes."""
        quantized = self.cache == "fp8e4nv"
        element_size = 4 if self.query == "fp32" else 2
        tiles: dict[Tile, list[int]] = {}
        for capability in CAPABILITIES:
            if not quantized or capability >= tree_attention._FP8_CAPABILITY:
                tile = choose_tile(
                    self.rows, self.head_size, element_size, capability, quantized, self.windowed,
                    bool(self.extra),
                )  # fmt: skip
                tiles.setdefault(tile, []).append(capability)
        return [self._variant(*each) for each in tiles.items()]

    def _variant(self, tile: Tile, capabilities: list[int]) -> Variant:
        extra = f" + {self.extra}" if self.extra else ""
        features = {
            " in 255": tile.max_registers, ", only nodes": self.only_nodes,
            ", window": self.windowed, ", soft cap": self.soft_capped, ", sinks": self.has_sinks,
        }  # fmt: skip
        return Variant(
            name=f"tree_attention {self.query} on {self.cache}, head {self.head_size}{extra}"
            f"/{self.group}, block {self.block_size}, {self.words} words: {tile.rows} x {tile.keys}"
            + "".join(name for name, has in features.items() if has),
            kernel=tree_attention_kernel,
            signature=_signature(self.query, self.cache),
            constexprs={
                **tree_attention._shared_constants(
                    self.group, self.head_size, tile.keys, self.windowed
                ),
                "BLOCK_SIZE": self.block_size, "WORDS": self.words,
                "QUANTIZED": self.cache == "fp8e4nv", "SCALES_IN_MEMORY": True,
                "ROWS": tile.rows, "ONLY_NODES": self.only_nodes,
                "SOFT_CAPPED": self.soft_capped, "HAS_SINKS": self.has_sinks, "EXTRA": self.extra,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            max_registers=tile.max_registers,
            capabilities=tuple(capabilities),
        )  # fmt: skip


def _merge_variants() -> list[Variant]:
    return [
        Variant(
            f"merge_splits head {size}{', window' if windowed else ''}",
            merge_splits_kernel,
            _signature("bf16", "bf16"),
            {
                **tree_attention._shared_constants(4, size, 64, windowed),
                "SPLITS_AT_ONCE": tree_attention._SPLITS_AT_ONCE,
            },
        )
        for size, windowed in ((64, False), (128, True), (128, False), (256, False), (512, False))
    ]


def _signature(dtype: str, cache: str) -> dict[str, str]:
    return {
        **dict.fromkeys(("query", "output", "sinks"), f"*{dtype}"),
        **dict.fromkeys(("key_cache", "value_cache"), f"*{cache}"),
        "ancestors": "*i32",
    }
