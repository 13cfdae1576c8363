"""Times long prompts, and decoding behind them, in one engine: ``python -m benchmarks.long_prompts
MODEL [DRAFT]``, plain without a draft. Prompts are random tokens, one at a time."""

import json
import statistics
import time
from typing import Annotated

import numpy as np
import typer
from vllm import LLM, SamplingParams

from sequoia_vllm.measuring.provenance import provenance

DECODED = 32


def main(
    model: str,
    draft: Annotated[str | None, typer.Argument()] = None,
    lengths: str = "64,1024,4096",
    dtype: str = "bfloat16",
    rounds: int = 3,
) -> None:
    """Prints the median of some rounds, after one that does not count."""
    sizes = [int(length) for length in lengths.split(",")]
    llm = LLM(
        model=model, dtype=dtype, max_model_len=2 * max(sizes), max_num_seqs=4,
        max_num_batched_tokens=2 * max(sizes), enable_prefix_caching=False,
        kv_cache_memory_bytes=2 << 30,  # CPUs would fill their memory at start, and take minutes
        speculative_config=draft and {"method": "sequoia", "model": draft},
    )  # fmt: skip
    vocabulary = llm.model_config.get_vocab_size()
    random, found = np.random.default_rng(0), {}
    for size in sizes:
        times = []
        for _ in range(1 + rounds):
            prompt = {"prompt_token_ids": random.integers(0, vocabulary, size).tolist()}
            first, whole = (seconds(llm, prompt, tokens) for tokens in (1, 1 + DECODED))
            times.append((first, (whole - first) / DECODED))
        prompts, tokens = zip(*times[1:], strict=True)
        found[size] = {
            "prompt_s": round(statistics.median(prompts), 3),
            "token_ms": round(1e3 * statistics.median(tokens), 1),
        }
    print(json.dumps({"draft": draft, "lengths": found, **provenance()}))


def seconds(llm: LLM, prompt: dict[str, list[int]], tokens: int) -> float:
    """Until so many tokens have come."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
