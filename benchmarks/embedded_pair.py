"""The pair in ``examples/models``: its prompts, and a V1 engine with trees of 16 nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TARGET, DRAFT = "examples/models/target", "examples/models/draft"
PROMPTS = "examples/models/prompts.jsonl"


def encoded_prompts(count: int) -> list[list[int]]:
    """Token ids of its first prompts; 200 at most. A synthetic target's are the same."""
    from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

    return encode_prompts(load_prompts(Path(PROMPTS), count), load_tokenizer(TARGET))


@contextmanager
def running(
    num_prompts: int, speculative: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """An engine whose modules a benchmark may change in between, and its requests; float32.

    Args:
        num_prompts: Requests; 200 at most.
        speculative: Other keys of the speculative configuration.
        options: Other arguments of ``vllm.LLM``.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from sequoia_vllm.measuring.engines import EngineSpec, open_engine

    encoded = encoded_prompts(num_prompts)
    config = {
        "method": "sequoia",
        "model": DRAFT,
        "tree": {"size": 16, "depth": 6},
        "num_speculative_tokens_per_batch_size": [[1, 1, 15]],
        **(speculative or {}),
    }
    engine = EngineSpec(TARGET, DRAFT, dtype="float32", enforce_eager=True, kv_cache_gib=0.5)
    with open_engine(
        engine, speculative_config=config, max_model_len=512, max_num_seqs=16,
        enable_prefix_caching=False, **options,
    ) as llm:  # fmt: skip
        yield llm, [{"prompt_token_ids": tokens} for tokens in encoded]
