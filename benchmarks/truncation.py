"""Tokens per step with top-k and top-p, with drafts that lean into the nucleus and without.

``python -m benchmarks.truncation`` runs the pair in ``examples/models`` on the V1 engine, a tree
of 16 nodes, float32. "Without" is Q by temperature alone: logits are lowered by 0.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from benchmarks.embedded_pair import running

SETTINGS: dict[str, dict[str, Any]] = {
    "top-k 20": {"top_k": 20},
    "top-p 0.8": {"top_p": 0.8},
    "top-p 0.9": {"top_p": 0.9},
}
TEMPERATURES = (1.0, 0.6)


def main() -> None:
    """Prints a row for each temperature and setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200, help="of each row, 200 at most")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each completion")
    options = parser.parse_args()
    from sequoia_vllm.verification import sampling

    leaning = sampling.LOWERED_BY
    with running(options.prompts) as (llm, requests):
        print("temperature  setting       without       with")
        for temperature in TEMPERATURES:
            for name, setting in SETTINGS.items():
                found = []
                for lowered_by in (0.0, leaning):
                    sampling.LOWERED_BY = lowered_by
                    found.append(_measure(llm, requests, options, temperature, setting))
                print(f"{temperature:11}  {name:9}", *found, sep="  ", flush=True)


def _measure(
    llm: Any, requests: list[Any], options: Any, temperature: float, setting: dict[str, Any]
) -> str:
    """Tokens per step of a request, and twice its standard error over the steps."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=temperature, max_tokens=options.max_tokens, ignore_eos=True, **setting
    )
    [before] = llm.collective_rpc("sequoia_stats")
    llm.generate(requests, params, use_tqdm=False)
    [after] = llm.collective_rpc("sequoia_stats")
    pairs = zip(after["depth_counts"], before["depth_counts"], strict=True)
    counts = [now - then for now, then in pairs]
    steps = sum(counts)
    mean = sum(count * (depth + 1) for depth, count in enumerate(counts)) / steps
    squares = sum(count * (depth + 1) ** 2 for depth, count in enumerate(counts)) / steps
    return f"{mean:.3f} +- {2 * math.sqrt((squares - mean**2) / steps):.3f}"


if __name__ == "__main__":
    main()
