"""Times the CPU's kernels by rows, of this checkout and of others, in turns.

    python -m benchmarks.cpu_kernels OUTPUT [CHECKOUT ...]

All layers of SmolLM2-135M in float32, one request: tree attention over a context, and the linear
layers, for chains of 1 to 32 rows. Each round times every checkout; the fastest of them counts.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from sequoia_vllm import linear_rows
from sequoia_vllm.attention import cpu_kernel
from sequoia_vllm.measuring.provenance import provenance

LAYERS, HEADS, KEY_HEADS, HEAD_SIZE, BLOCK = 30, 9, 3, 64, 128
WEIGHTS = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS, CONTEXTS, ROUNDS = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32), (128, 512, 1024), 12


def load(checkout: Path) -> tuple[Any, Any]:
    """The kernels of tree attention, and of linear layers in float32."""
    own = checkout / "sequoia_vllm"
    with (
        patch.object(cpu_kernel, "_SOURCE", own / "attention/tree_attention.cpp"),
        patch.object(linear_rows, "_SOURCE", own / "linear_rows.cpp"),
    ):
        multiply = linear_rows.load_kernel.__wrapped__(torch.float32)
        return cpu_kernel.load_kernels.__wrapped__(), multiply


def attention(context: int, rows: int) -> Callable[[Any], None]:
    """What attends all layers of a chain of so many rows, by a kernel."""
    shape = cpu_kernel.AttentionShape(
        HEADS, KEY_HEADS, HEAD_SIZE, BLOCK, HEAD_SIZE**-0.5, torch.float32
    )
    blocks = (context + rows) // BLOCK + 1
    trees = cpu_kernel.TreeQueries(
        torch.arange(rows)[None], torch.arange(blocks, dtype=torch.int32)[None],
        torch.tensor([context]), torch.tensor([rows]),
        torch.ones(rows, rows, dtype=torch.bool).tril(), context + rows, only_trees=True,
    )  # fmt: skip
    caches = torch.randn(LAYERS, blocks, KEY_HEADS, BLOCK, 2 * HEAD_SIZE)
    query = torch.randn(rows, HEADS * HEAD_SIZE)
    output, batch = torch.empty_like(query), trees.for_kernel(shape)

    def run(kernels: Any) -> None:
        for cache in caches:
            batch.attend(kernels, query, cache, output)

    return run


def linear(weights: list[list[torch.Tensor]], rows: int) -> Callable[[Any], None]:
    """What multiplies so many rows by all layers' weights, by a kernel."""
    inputs = [torch.randn(rows, inner) for _, inner in WEIGHTS]

    def run(kernel: Any) -> None:
        with patch.object(linear_rows, "load_kernel", lambda _: kernel):
            for layer in weights:
                for values, weight in zip(inputs, layer, strict=True):
                    linear_rows.linear_rows(values, weight, None)

    return run


def milliseconds(run: Callable[[Any], None], kernels: list[Any]) -> list[float]:
    """The fastest round of each kernel."""
    took = torch.empty(ROUNDS, len(kernels), dtype=torch.float64)
    for times in took:
        for place, kernel in enumerate(kernels):
            started = time.perf_counter()
            run(kernel)
            times[place] = 1e3 * (time.perf_counter() - started)
    return [round(fastest, 2) for fastest in took.amin(dim=0).tolist()]


def main() -> None:
    """Measures, and writes the file."""
    output, *others = sys.argv[1:]
    attend, multiply = zip(*(load(Path(place)) for place in (".", *others)), strict=True)
    found: dict[str, Any] = {"checkouts": [".", *others], "rows": ROWS}
    for context in CONTEXTS:
        times = [milliseconds(attention(context, rows), list(attend)) for rows in ROWS]
        found[f"attention over {context} tokens, ms"] = times
        print(context, dict(zip(ROWS, times, strict=True)), flush=True)
    weights = [[torch.randn(shape) for shape in WEIGHTS] for _ in range(LAYERS)]
    found["linear layers, ms"] = [
        milliseconds(linear(weights, rows), list(multiply)) for rows in ROWS
    ]
    print("linear", dict(zip(ROWS, found["linear layers, ms"], strict=True)), flush=True)
    made = provenance(command="python -m benchmarks.cpu_kernels", **found)
    Path(output).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
