"""What a new user gets: an engine that nobody tuned, after a while, against plain vLLM and chains.

``python -m benchmarks.untuned`` runs the pair in ``examples/models``; ``--model`` takes a
synthetic target. All engines first complete so many tokens of every request (``--warm-up``). Then
they take turns, and every one completes the same prompts. Trees and what engines learned are kept
in a directory of this run, which is empty at first.

Above temperature 0 vLLM's chain samples wrongly on CPUs, so its tokens and its speed tell nothing.
The same chain then runs as a tree of ours, frozen, with Algorithm 2, which for a chain is vLLM's
own test.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from statistics import median
from typing import Any

from benchmarks.embedded_pair import DRAFT, TARGET, encoded_prompts
from benchmarks.tokens_per_step import tokens_per_step
from sequoia_vllm.measuring.engine_processes import engines_end_here


def main() -> None:
    """Prints throughput over plain vLLM's: the median of all rounds, and the extremes.

    Above temperature 0 every engine draws other tokens, so tokens per step come with twice their
    standard error over steps.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--draft-model", default=DRAFT)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chain", default="2,4", help="lengths of chains")
    parser.add_argument("--batch-sizes", default="1,4")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warm-up", type=int, default=300, help="tokens of every request")
    parser.add_argument("--max-tokens", type=int, default=160, help="of every request and round")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as learned, engines_end_here():
        os.environ["SEQUOIA_VLLM_TREES"] = learned
        _compare(options)


def _compare(options: Any) -> None:
    from sequoia_vllm.bench.engines import engine_options, open_engines
    from sequoia_vllm.bench.methods import Kind, Method, plain
    from sequoia_vllm.measuring.engines import EngineSpec

    config = {"method": "sequoia", "model": options.draft_model}
    untuned = Method("as it is", Kind.SEQUOIA, config, 15)
    lengths = [int(length) for length in options.chain.split(",")]
    chains = [_chain(options.draft_model, length, options.temperature) for length in lengths]
    methods = [plain(), *chains, untuned]
    batch_sizes = [int(size) for size in options.batch_sizes.split(",")]
    longest = max(options.warm_up, options.max_tokens)
    room = engine_options(longest + 128, max(batch_sizes), most_drafts=16)
    spec = EngineSpec(options.model, options.draft_model, dtype=options.dtype, kv_cache_gib=0.25)
    with open_engines(methods, spec, room, lambda *_: None) as engines:
        for batch_size in batch_sizes:
            _compare_at(engines, batch_size, options)


def _chain(draft: str, length: int, temperature: float) -> Any:
    from sequoia_vllm.bench.methods import Kind, Method, chain
    from sequoia_vllm.tree import TokenTree

    if temperature == 0:
        return chain(draft, length)
    tree = {"parents": list(TokenTree.chain(length).parents)}
    config = {"method": "sequoia", "model": draft, "tree": tree, "adapt": False}
    return Method(f"chain of {length}, as a tree", Kind.SEQUOIA, config, length)


def _compare_at(engines: dict[str, Any], batch_size: int, options: Any) -> None:
    from sequoia_vllm.bench.rounds import EngineCase, run_round

    prompts = _prompts(batch_size, 1 + options.rounds)
    case = EngineCase(batch_size, options.temperature)
    for engine in engines.values():
        run_round(engine, prompts[0], case, options.warm_up)
    runs: dict[str, list[Any]] = {name: [] for name in engines}
    for round_prompts in prompts[1:]:
        for name, engine in engines.items():
            runs[name].append(run_round(engine, round_prompts, case, options.max_tokens))
    print(f"batch size {batch_size}, temperature {options.temperature}")
    plain = runs["plain vLLM"]
    for name, own in runs.items():
        print(f"  {name}: {_summary(own, plain, options.temperature)}", flush=True)


def _summary(own: list[Any], plain: list[Any], temperature: float) -> str:
    """One line on the rounds of one engine, beside plain vLLM's."""
    ours, theirs = ([_milliseconds(run) for run in runs] for runs in (own, plain))
    ratios = [base / time for base, time in zip(theirs, ours, strict=True)]
    speed = (
        f"{median(ours):.2f} ms per token, {median(theirs) / median(ours):.3f}x "
        f"(rounds {min(ratios):.2f} to {max(ratios):.2f})"
    )
    if temperature == 0:
        same = all(a.token_ids == b.token_ids for a, b in zip(own, plain, strict=True))
        return f"{speed}, as plain: {same}"
    return f"{speed}, {tokens_per_step(own)}"


def _milliseconds(run: Any) -> float:
    """Per token and request while all requests of a round decode."""
    return float(1e3 * run.steady.batch_size / run.steady.tokens_per_second)


def _prompts(batch_size: int, rounds: int) -> list[list[list[int]]]:
    """Token ids of the batch of each round: other prompts every time."""
    encoded = [ids[:64] for ids in encoded_prompts(batch_size * rounds)]
    return [encoded[start : start + batch_size] for start in range(0, len(encoded), batch_size)]


if __name__ == "__main__":
    main()
