"""Times a draft's levels with all rows of its output layer, and with some.

``python -m benchmarks.draft_vocabulary`` makes a draft of Qwen2.5-0.5B's shape with random
weights, and a tiny target with as many tokens. Two engines take turns, one request each: what is
timed is each level's forward, its logits of the target's tokens included. Random weights say
nothing of acceptance.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any

TREE = {"size": 16, "depth": 4}


def main() -> None:
    """Prints quartiles of a level's milliseconds, and their quotient."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--kept", type=int, default=32_768, help="rows that stay")
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--width", type=int, default=4864, help="of the MLP")
    parser.add_argument("--tokens", type=int, default=24, help="of every request")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as directory:
        _compare(Path(directory), options)


def _compare(directory: Path, options: Any) -> None:
    target, draft = directory / "target", directory / "draft"
    _save_shape(target, options.vocabulary, hidden=128, layers=1, heads=2, width=256)
    _save_shape(
        draft, options.vocabulary, options.hidden, options.layers, options.heads, options.width
    )
    kept = list(range(options.kept))
    with ExitStack() as engines:
        opened = [
            engines.enter_context(_engine(target, draft, tokens, options.dtype))
            for tokens in (None, kept)
        ]
        seconds: list[list[float]] = [[], []]
        for turn in range(options.rounds + 1):
            for llm, found in zip(opened, seconds, strict=True):
                levels = _levels(llm, options.tokens)
                found.extend(levels if turn else [])  # the first warms up
    medians = []
    for rows, found in zip((options.vocabulary, options.kept), seconds, strict=True):
        low, middle, high = (1e3 * value for value in quantiles(found, n=4))
        print(f"{rows:,} rows: {middle:.1f} ms a level ({low:.1f} to {high:.1f}), {len(found)}")
        medians.append(middle)
    print(f"{medians[0] / medians[1]:.2f}x")


def _save_shape(
    path: Path, vocabulary: int, hidden: int, layers: int, heads: int, width: int
) -> None:
    from transformers import Qwen2Config

    Qwen2Config(
        architectures=["Qwen2ForCausalLM"], vocab_size=vocabulary, hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=2,
        intermediate_size=width, max_position_embeddings=512, tie_word_embeddings=True,
    ).save_pretrained(path)  # fmt: skip


def _engine(target: Path, draft: Path, kept: list[int] | None, dtype: str) -> Any:
    from sequoia_vllm.measuring.engines import EngineSpec, open_engine, room_for

    config = {
        "method": "sequoia", "model": str(draft), "tree": TREE, "adapt": False,
        "draft_vocabulary": kept, "draft_load_config": {"load_format": "dummy"},
    }  # fmt: skip
    spec = EngineSpec(str(target), str(draft), dtype=dtype, enforce_eager=True, kv_cache_gib=0.25)
    return open_engine(
        spec, load_format="dummy", skip_tokenizer_init=True, speculative_config=config,
        disable_log_stats=True, **room_for(256, 1, TREE["size"]),
    )  # fmt: skip


def _levels(llm: Any, tokens: int) -> list[float]:
    """Seconds of each level's forward of one request."""
    from vllm import SamplingParams

    llm.collective_rpc("sequoia_stats", args=(True, True))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5] * 32}], params, use_tqdm=False)
    [stats] = llm.collective_rpc("sequoia_stats", args=(True,))
    return [
        seconds
        for part, _, rows, seconds in stats["trace"]
        if part == "draft" and rows <= TREE["size"]
    ]


if __name__ == "__main__":
    main()
