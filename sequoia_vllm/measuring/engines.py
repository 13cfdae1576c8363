"""Engines for measuring, and prompts of the length wanted."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sequoia_vllm.measuring.errors import CalibrationError

Progress = Callable[[str, int, int], None]
"""Called with (what is done, done, all)."""

_NO_LIMIT = 1 << 20
# Only looked at before an engine starts, where the KV cache has its size already.
_SHARE_OF_GPU = 0.05
# A worker polls its queue for a second after its last message, and takes a core
# from the other engines (steps get 5 % slower); then it sleeps (SpinCondition in
# vLLM's shm_broadcast.py).
_POLLING_SECONDS = 1.2


@contextmanager
def open_engine(target: str, *, seed: int = 0, **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM``, shut down at the end; ``options`` are its arguments.

    Raises:
        CalibrationError: If vLLM cannot start it.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    if "kv_cache_memory_bytes" in options and not current_platform.is_cpu():
        # Several engines share a GPU: each would want nine tenths of it to be free.
        options.setdefault("gpu_memory_utilization", _SHARE_OF_GPU)
    try:
        llm = LLM(model=target, seed=seed, **options)
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


def wait_for_quiet() -> None:
    """Waits until no other engine's worker polls; engines within this process never do."""
    from vllm import envs

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        time.sleep(_POLLING_SECONDS)


def load_config(model: str) -> Any:
    """The model's configuration, as transformers reads it.

    Raises:
        CalibrationError: If there is none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (ValueError, OSError) as error:
        raise CalibrationError(f"no configuration of the model {model!r}: {error}") from error


def longest_context(model: str) -> int:
    """Tokens that the model takes at most."""
    config = load_config(model).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or _NO_LIMIT)


def count_parameters(model: str) -> float:
    """Parameters of a model by its configuration; no weights are read.

    Raises:
        CalibrationError: If transformers does not know the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(load_config(model))
    except (ValueError, OSError) as error:
        raise CalibrationError(f"cannot count the parameters of {model!r}: {error}") from error
    return float(sum(parameter.numel() for parameter in built.parameters()))


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
