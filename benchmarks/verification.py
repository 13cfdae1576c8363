"""Traversal against Algorithm 2: the same tree, sampled, in alternating rounds.

``python -m benchmarks.verification`` runs the pair in ``examples/models``; ``--model`` takes a
synthetic target, and ``--offload-directory`` reads its layers from a disk in every pass. Both
engines get the same tree and the same prompts, at batch size 1.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.embedded_pair import DRAFT, TARGET, encoded_prompts
from benchmarks.tokens_per_step import tokens_per_step

METHODS = {"Algorithm 2": "sequoia", "traversal": "traversal"}


def main() -> None:
    """Prints tokens per step, times and speed over plain vLLM's of both methods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--draft-model", default=DRAFT)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tree", default="16x6", help="as bench's --trees")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=8, help="of each round")
    parser.add_argument("--max-tokens", type=int, default=96, help="of every request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--offload-directory", type=Path)
    _compare(parser.parse_args())


def _compare(options: Any) -> None:
    from sequoia_vllm.bench.measure import measure
    from sequoia_vllm.bench.rounds import BenchSettings
    from sequoia_vllm.config import OffloadSpec
    from sequoia_vllm.measuring.engines import EngineSpec

    directory = options.offload_directory
    spec = EngineSpec(
        options.model,
        options.draft_model,
        dtype=options.dtype,
        kv_cache_gib=0.25,
        offload=None if directory is None else OffloadSpec(directory=directory),
    )
    settings = BenchSettings(
        spec,
        methods=tuple(_methods(options)),
        prompts=tuple(ids[:64] for ids in encoded_prompts(options.prompts)),
        temperatures=(options.temperature,),
        max_tokens=options.max_tokens,
        rounds=options.rounds,
    )
    [runs] = measure(settings).runs.values()
    _print({method.method.name: method.rounds for method in runs})


def _methods(options: Any) -> list[Any]:
    """Plain vLLM, then the tree with each method."""
    from sequoia_vllm.bench.methods import plain, sequoia

    one = sequoia(options.draft_model, options.tree)
    config = one.speculative_config
    assert config is not None
    return [
        plain(),
        *(
            replace(one, name=name, speculative_config={**config, "verification": key})
            for name, key in METHODS.items()
        ),
    ]


def _print(runs: dict[str, list[Any]]) -> None:
    """Speeds are medians over rounds."""
    from sequoia_vllm.bench.decode_rate import pooled

    speeds = {
        name: median(run.steady.tokens_per_second for run in own) for name, own in runs.items()
    }
    for name, own in runs.items():
        step = pooled([run.steady for run in own])
        print(
            f"{name}: {tokens_per_step(own)} of {1e3 * step.step_seconds:.1f} ms, "
            f"{step.steps} steps; {speeds[name] / speeds['plain vLLM']:.3f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
