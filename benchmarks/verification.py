"""Traversal against Algorithm 2: the same tree, sampled, in alternating rounds.

``python -m benchmarks.verification`` runs the pair in ``examples/models``; ``--model`` takes a
grown target, and ``--offload-directory`` reads its layers from a disk in every pass. Both engines
get the same tree and the same prompts, at batch size 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.embedded_pair import DRAFT, PROMPTS, TARGET

METHODS = {"Algorithm 2": "sequoia", "traversal": "traversal"}


def main() -> None:
    """Prints tokens per step, times and speed over plain vLLM's of both methods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--draft-model", default=DRAFT)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tree", type=Path, help="file of a tree; none: 16 nodes, 6 deep")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=8, help="of each round")
    parser.add_argument("--max-tokens", type=int, default=96, help="of every request")
    parser.add_argument("--rounds", type=int, default=3, help="each with prompts of its own")
    parser.add_argument("--offload-directory", type=Path)
    _compare(parser.parse_args())


def _compare(options: Any) -> None:
    from sequoia_vllm.bench.engines import Limits, open_engines
    from sequoia_vllm.bench.rounds import Case, run_round
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
    methods = _methods(options)
    limits = Limits(64 + options.max_tokens, max_num_seqs=1, most_drafts=methods[-1].most_drafts)
    case = Case(1, options.temperature)
    warm_up, *rounds = _prompts(options.prompts, 1 + options.rounds)
    with open_engines(methods, spec, limits, lambda *_: None) as engines:
        for engine in engines.values():
            run_round(engine, warm_up[:1], case, options.max_tokens)
        runs: dict[str, list[Any]] = {name: [] for name in engines}
        for prompts in rounds:
            for name, engine in engines.items():
                runs[name].append(run_round(engine, prompts, case, options.max_tokens))
    _print(runs)


def _methods(options: Any) -> list[Any]:
    """Plain vLLM, then the tree with each method."""
    from sequoia_vllm.bench.methods import Kind, Method, plain
    from sequoia_vllm.library.tree_reference import find_tree

    tree: Any = {"size": 16, "depth": 6}
    drafts = 15
    if options.tree is not None:
        found = find_tree(str(options.tree)).tree
        tree, drafts = {"parents": list(found.parents)}, found.num_speculative_tokens
    config = {"method": "sequoia", "model": options.draft_model, "tree": tree, "adapt": False}
    return [
        plain(),
        *(
            Method(name, Kind.SEQUOIA, {**config, "verification": key}, drafts)
            for name, key in METHODS.items()
        ),
    ]


def _prompts(count: int, rounds: int) -> list[list[list[int]]]:
    from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

    prompts = load_prompts(Path(PROMPTS), count * rounds)
    encoded = [ids[:64] for ids in encode_prompts(prompts, load_tokenizer(TARGET))]
    return [encoded[start : start + count] for start in range(0, len(encoded), count)]


def _print(runs: dict[str, list[Any]]) -> None:
    """Tokens per step with twice the standard error over steps, and medians over rounds."""
    speeds = {
        name: median(run.steady.tokens_per_second for run in own) for name, own in runs.items()
    }
    for name, own in runs.items():
        tokens = [number for run in own for number in run.step_tokens]
        error = 2 * stdev(tokens) / len(tokens) ** 0.5
        step = 1e3 * sum(run.steady.seconds for run in own) / sum(run.steady.steps for run in own)
        print(
            f"{name}: {fmean(tokens):.3f} +- {error:.3f} tokens per step of {step:.1f} ms, "
            f"{len(tokens)} steps; {speeds[name] / speeds['plain vLLM']:.3f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
