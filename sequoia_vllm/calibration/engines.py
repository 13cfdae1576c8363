"""Engines for measuring, and the prompts they are given."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sequoia_vllm.calibration.errors import CalibrationError


@contextmanager
def open_engine(target: str, **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM``, shut down at the end.

    Raises:
        CalibrationError: If vLLM cannot start it.
    """
    from vllm import LLM

    try:
        llm = LLM(model=target, seed=0, **options)
    except (ValueError, OSError, RuntimeError) as error:
        draft = (options.get("speculative_config") or {}).get("model")
        pair = f"{target!r} with draft {draft!r}" if draft else repr(target)
        raise CalibrationError(f"vLLM cannot start an engine for {pair}: {error}") from error
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def load_prompts(path: Path, count: int | None = None) -> list[str]:
    """Prompts of a ``.jsonl`` file with a "prompt" per line; None: all of them.

    Raises:
        CalibrationError: If the file is missing, has another format or too few prompts.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CalibrationError(
            f"cannot read prompts {path}: {error.strerror or error}; name a file with --prompts"
        ) from error
    prompts = []
    for number, line in enumerate(filter(str.strip, lines[:count]), start=1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise CalibrationError(
                f'prompts {path}, line {number}: every line must be {{"prompt": "text"}}'
            ) from error
        prompts.append(str(prompt))
    if not prompts or (count is not None and len(prompts) < count):
        raise CalibrationError(f"prompts {path} holds {len(prompts)} prompts, not {count or 'any'}")
    return prompts


def encode(target: str, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt, by the target's tokenizer.

    Raises:
        CalibrationError: If there is no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (ValueError, OSError) as error:
        raise CalibrationError(f"no tokenizer for the target {target!r}: {error}") from error
    return [tokenizer.encode(prompt) for prompt in prompts]


def token_windows(encoded: Sequence[Sequence[int]], count: int, length: int) -> list[list[int]]:
    """Different prompts of exactly ``length`` tokens, cut from the texts joined in a circle.

    Raises:
        CalibrationError: If the texts have no tokens.
    """
    joined = [token for tokens in encoded for token in tokens]
    if not joined:
        raise CalibrationError("the prompts have no tokens")
    step = max(1, len(joined) // count)
    return [
        [joined[(index * step + offset) % len(joined)] for offset in range(length)]
        for index in range(count)
    ]
