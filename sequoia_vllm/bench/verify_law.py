"""The sampled check of `verify`: plain vLLM scores the samples, then the draft alone does.

Sampled tokens have the target's law whatever is drafted. Where verification is wrong, they lean to
what the draft likes, or away from it (`verifying/law.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from sequoia_vllm.bench.methods import Kind, Method
from sequoia_vllm.bench.verify_engine import LIKELIEST, VerifyEngine
from sequoia_vllm.drafters.registry import is_kind_alone
from sequoia_vllm.engine.frontend.drafts import recognise
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.measuring.engines import compare_models, load_config, longest_context
from sequoia_vllm.verifying.answers import Two
from sequoia_vllm.verifying.law import Law, check_law

DRAFT = Method("the draft alone", Kind.PLAIN, None, 0)
_SHARED = (
    "dtype", "seed", "trust_remote_code", "max_model_len", "max_num_seqs", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "skip_tokenizer_init", "max_logprobs",
)  # fmt: skip
"""Options of the target's engine that are the draft's, too."""


@dataclass(frozen=True)
class Samples:
    """An engine's sampled answers, and what the target says at each token."""

    what: str
    prompts: Sequence[list[int]]  # of each answer
    answers: Sequence[list[int]]
    likeliest: Sequence[Sequence[Two]]


def scored_samples(
    engine: VerifyEngine, prompts: Sequence[list[int]], samples: int,
    found: Mapping[str, Sequence[list[int]]],
) -> list[Samples]:  # fmt: skip
    """Lets plain vLLM score sampled answers.

    Args:
        samples: Answers in a row with one prompt.
        found: Each engine's answers.
    """
    each = [list(prompt) for prompt in prompts for _ in range(samples)]
    return [
        Samples(what, each, answers, _likeliest(engine, each, answers))
        for what, answers in found.items()
    ]


def _likeliest(
    engine: VerifyEngine, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[Sequence[Two]]:
    pairs = zip(prompts, answers, strict=True)
    return [engine.score(prompt, answer, LIKELIEST).likeliest for prompt, answer in pairs]


def cannot_ask(target: str, draft: str) -> str:
    """Why the draft cannot score the target's tokens by itself; "": it can."""
    if is_kind_alone(draft) or recognise(load_config(draft)).kind != "model":
        return "it is no model of its own"
    if compare_models(target, draft).matching is not None:
        return "it has another vocabulary"
    return ""


def draft_options(draft: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for the draft alone.

    Args:
        options: Those of the target's engine.
    """
    own = {name: options[name] for name in _SHARED if name in options}
    length = min(own.get("max_model_len", longest_context(draft)), longest_context(draft))
    return {**own, "model": draft, "max_model_len": length, "enforce_eager": True}


def laws(
    found: Sequence[Samples], samples: int, target: str, draft: str,
    opened: Callable[[], AbstractContextManager[VerifyEngine]],
) -> tuple[list[Law], list[str]]:  # fmt: skip
    """Tests each engine's samples.

    Args:
        samples: Answers in a row with one prompt.
        opened: Starts the draft's engine.

    Returns:
        A law for each engine, and a note if the draft could not be asked.
    """
    drafted: list[Sequence[Sequence[Two]]] = [() for _ in found]
    try:
        if not (refused := cannot_ask(target, draft)):
            with opened() as engine:
                drafted = [_likeliest(engine, one.prompts, one.answers) for one in found]
    except CalibrationError as error:
        refused = str(error).splitlines()[0]
    note = f"the draft was not asked what it likes ({refused}): a wrong residual may go unseen"
    pairs = zip(found, drafted, strict=True)
    return [
        check_law(one.what, one.answers, one.likeliest, samples, scores) for one, scores in pairs
    ], [note] * bool(refused)
