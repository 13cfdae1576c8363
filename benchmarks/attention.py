"""Times tree attention against vLLM's own CPU attention for as many query tokens.

Run it in a checkout as ``python -m benchmarks.attention``. Both read the same paged
cache, turn about; times are medians of one call, one layer, one request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor
from vllm import _custom_ops as ops

from sequoia_vllm.attention.cpu_kernel import AttentionShape, TreeAttentionBatch, load_kernels
from sequoia_vllm.tree import optimize_tree
from sequoia_vllm.tree.published import REFERENCE_ACCEPTANCE

BLOCK_SIZE = 128  # vLLM's default on CPUs
SHAPES = ((4, 4, 64), (32, 8, 128))  # heads, key heads, head size
CONTEXTS = (256, 8192)
TREE_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True)
class Timing:
    """Medians, in seconds, of one layer's attention over one request."""

    tree: float
    vllm: float


def time_attention(
    heads: int, key_heads: int, head_size: int, context: int, size: int, dtype: torch.dtype
) -> Timing:
    """One pair of measurements.

    Args:
        heads, key_heads, head_size: Of the layer.
        context: Committed tokens.
        size: Nodes of the tree, and query tokens of vLLM's chain.
        dtype: Of the cache and the queries.
    """
    blocks = -(-(context + size) // BLOCK_SIZE)
    cache = torch.randn(blocks, key_heads, BLOCK_SIZE, 2 * head_size).to(dtype)
    table = torch.randperm(blocks)[None].to(torch.int32)
    query = torch.randn(size, heads, head_size).to(dtype)
    scale = head_size**-0.5
    tree = _tree_call(
        AttentionShape(heads, key_heads, head_size, BLOCK_SIZE, scale, dtype),
        cache, table, query, context, size,
    )  # fmt: skip
    vllm = _vllm_call(cache, table, query, context + size, scale)
    return Timing(*_medians(tree, vllm))


def _tree_call(
    shape: AttentionShape, cache: Tensor, table: Tensor, query: Tensor, context: int, size: int
) -> Callable[[], None]:
    kernels = load_kernels()
    assert kernels is not None, "no C++ compiler: there is no kernel to time"
    ancestors = optimize_tree(REFERENCE_ACCEPTANCE, size).ancestor_mask
    rows, output = torch.arange(size)[None], torch.empty_like(query)

    def call() -> None:  # with what the engine does once per step for all layers
        trees = TreeAttentionBatch(
            shape, rows, table, torch.tensor([context]), torch.tensor([size]),
            torch.from_numpy(ancestors), context + size,
        )  # fmt: skip
        trees.attend(kernels, query, cache, output)

    return call


def _vllm_call(
    cache: Tensor, table: Tensor, query: Tensor, length: int, scale: float
) -> Callable[[], None]:
    size, heads, head_size = query.shape
    keys, values = cache.view(*cache.shape[:2], 2 * BLOCK_SIZE, head_size).chunk(2, dim=2)
    starts, lengths = torch.tensor([0, size]).int(), torch.tensor([length]).int()
    metadata = ops.cpu_attn_get_scheduler_metadata(
        1, heads, cache.shape[1], head_size, lengths, query.dtype, starts, True, -1, "vec", True
    )
    output = torch.empty_like(query)

    def call() -> None:
        ops.cpu_attention_with_kv_cache(
            query, keys, values, output, starts, lengths, scale, True, None, -1, table, 0.0,
            metadata, None,
        )  # fmt: skip

    return call


def _medians(*calls: Callable[[], None], rounds: int = 41) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [sorted(own)[rounds // 2] for own in times]


def main(
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
) -> None:
    """Prints milliseconds per layer, and tree attention as a multiple of vLLM's."""
    from rich.console import Console
    from rich.table import Table

    columns = ("heads", "key heads", "head size", "context", "nodes", "tree", "vLLM", "ratio")
    table = Table(*columns, title=f"{dtype}, {torch.get_num_threads()} threads: ms per layer")
    for shape in SHAPES:
        for context in CONTEXTS:
            for size in TREE_SIZES:
                timing = time_attention(*shape, context, size, getattr(torch, dtype))
                table.add_row(
                    *map(str, (*shape, context, size)),
                    f"{1e3 * timing.tree:.3f}", f"{1e3 * timing.vllm:.3f}",
                    f"{timing.tree / timing.vllm:.2f}",
                )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
