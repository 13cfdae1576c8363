"""Engines for measuring, facts about their models, and prompts of a wanted length."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sequoia_vllm.config import OffloadSpec
from sequoia_vllm.engine.offload import with_offload
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.hardware.budget import warm_up_length
from sequoia_vllm.measuring.interrupts import interrupts_get_through, is_ending
from sequoia_vllm.model_source import hub_problem

if TYPE_CHECKING:
    from sequoia_vllm.engine.runner.vocabulary import Comparison

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, parts done, parts in all)."""

_NO_LIMIT = 1 << 20
# vLLM only requires this share of memory to be free at start: we set the KV cache's size ourselves.
_SHARE_OF_GPU = 0.05
# A worker polls its queue for a second after its last message, then sleeps (SpinCondition in
# vLLM's shm_broadcast.py). Until then it takes a core, and other engines' steps get 5 % slower.
_POLLING_SECONDS = 1.2


@dataclass(frozen=True)
class EngineSpec:
    """Settings that all engines of one measurement share."""

    target: str
    draft: str
    _: KW_ONLY
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kv_cache_gib: float = 1.0
    offload: OffloadSpec | None = None
    """How the target's layers are read from a disk (`OffloadSpec`); None: from memory."""


@contextmanager
def open_engine(engine: EngineSpec, *, seed: int = 0, **options: Any) -> Iterator[Any]:
    """Opens a ``vllm.LLM`` with these further arguments, and shuts it down at the end.

    Raises:
        CalibrationError: vLLM cannot start it.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        # Several engines share a GPU, and by default vLLM wants most of it to be free.
        options.setdefault("gpu_memory_utilization", _SHARE_OF_GPU)
    with open_llm(
        model=engine.target,
        dtype=engine.dtype,
        tensor_parallel_size=engine.tensor_parallel_size,
        enforce_eager=engine.enforce_eager,
        kv_cache_memory_bytes=int(engine.kv_cache_gib * (1 << 30)),
        additional_config=with_offload(None, engine.offload),
        seed=seed,
        **options,
    ) as llm:
        yield llm


@contextmanager
def open_llm(**options: Any) -> Iterator[Any]:
    """Opens a ``vllm.LLM`` with these arguments alone; otherwise like `open_engine`."""
    from vllm import LLM

    try:
        with interrupts_get_through():
            llm = LLM(**options)
    except (ValueError, OSError, RuntimeError) as error:
        draft = (options.get("speculative_config") or {}).get("model")
        pair = repr(options["model"]) + (f" with draft {draft!r}" if draft else "")
        raise CalibrationError(f"vLLM cannot start an engine for {pair}: {error}") from error
    try:
        yield llm
    finally:
        # After a signal it ends with this process: vLLM collects garbage twice for each engine.
        if not is_ending():
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


def room_for(length: int, requests: int, nodes: int) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that leave room for requests with trees of up to ``nodes`` nodes.
    The longest request has ``length`` tokens, including a tree after its last token."""
    length = max(length, warm_up_length(nodes))
    return {
        "max_model_len": length,
        "max_num_seqs": requests,
        # Trees may take half of it, and vLLM keeps a slot of each request free for drafting.
        # A larger number would slow the start: engines begin with a pass over so many tokens.
        "max_num_batched_tokens": max(512, length, 2 * requests * (nodes + 1)),
    }


def wait_for_quiet() -> None:
    """Waits until no other engine's worker polls; engines within this process never poll."""
    from vllm import envs

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        time.sleep(_POLLING_SECONDS)


def load_config(model: str) -> Any:
    """The model's configuration by transformers; refuses a model that has none, and says why."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (ValueError, OSError) as error:
        if not Path(model).exists():
            raise CalibrationError(hub_problem(model, error)) from error
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CalibrationError(f"no configuration of the model {model!r}: {first}") from error


def longest_context(model: str) -> int:
    """The most tokens that the model takes."""
    config = load_config(model).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or _NO_LIMIT)


def count_parameters(model: str) -> float:
    """Counts a model's parameters from its configuration, without weights.

    Raises:
        CalibrationError: transformers does not know the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(load_config(model))
    except (ValueError, OSError) as error:
        raise CalibrationError(f"cannot count the parameters of {model!r}: {error}") from error
    return float(sum(parameter.numel() for parameter in built.parameters()))


def compare_models(target: str, draft: str) -> "Comparison":
    """Compares two models' vocabularies, like an engine with both.
    It refuses a draft that cannot serve this target, and a model that is missing."""
    from sequoia_vllm.engine.runner.vocabulary import TokensOf, compare_vocabularies

    found = (
        TokensOf(model, load_config(model).get_text_config().vocab_size)
        for model in (target, draft)
    )
    return compare_vocabularies(*found)


def token_windows(encoded: Sequence[Sequence[int]], count: int, length: int) -> list[list[int]]:
    """Cuts ``count`` different prompts of ``length`` tokens from the texts joined in a circle.
    It refuses texts without tokens."""
    joined = [token for tokens in encoded for token in tokens]
    if not joined:
        raise CalibrationError("the prompts have no tokens")
    step = max(1, len(joined) // count)
    return [
        [joined[(index * step + offset) % len(joined)] for offset in range(length)]
        for index in range(count)
    ]
