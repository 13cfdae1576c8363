"""Requests drawn at random, by a seed: they can be printed, and sent again."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

REGEX = r"[a-z]{3,8} = \d{1,4}( \+ [a-z]{1,5}){0,3}"
CHOICE = ["return None", "raise ValueError", "pass"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "tuple"]}, "sorted": {"type": "boolean"}},
    "required": ["kind", "sorted"],
    "additionalProperties": False,
}
_LONGEST = 1000  # characters; the small pair takes 512 tokens, three or four characters each
MOST_ALLOWED = 1024  # ids: more of them end an engine on vLLM's Model Runner V2
STRUCTURED: tuple[dict[str, Any], ...] = ({"regex": REGEX}, {"choice": CHOICE}, {"json": SCHEMA})


@dataclass(frozen=True)
class RandomRequest:
    """One request.

    Attributes:
        arrives: The engine's step before which it comes.
        leaves: Tokens after which its client is gone; None: it stays.
        parameters: Of its sampling, by the names that `vllm.SamplingParams` and the completions
            endpoint have in common.
        most_drafts: ``sequoia_max_drafts``, if it says so.
    """

    number: int
    prompt: str
    arrives: int
    leaves: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    structured: dict[str, Any] | None = None
    most_drafts: int | None = None

    def __str__(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def random_requests(
    prompts: Sequence[str], count: int, seed: int, vocabulary: int
) -> list[RandomRequest]:
    """Random requests, the same for the same arguments."""
    source = random.Random(seed)
    found, arrives = [], 0
    for number in range(count):
        # They come in bursts, and one by one.
        arrives += source.choice((0, 0, 0, 1, 3, 8, 20))
        structured = source.choice(STRUCTURED) if source.random() < 0.08 else None
        found.append(
            RandomRequest(
                number,
                _prompt(source, prompts),
                arrives,
                leaves=source.randint(1, 12) if source.random() < 0.05 else None,
                parameters=_parameters(source, vocabulary, structured is not None),
                structured=structured,
                most_drafts=source.choice((0, 1, 3, 7)) if source.random() < 0.15 else None,
            )
        )
    return found


def _prompt(source: random.Random, prompts: Sequence[str]) -> str:
    """A prompt or a piece of it, some after a prefix that others share, some long."""
    text = source.choice(prompts)
    text = text[: source.randint(1, len(text))] if source.random() < 0.5 else text
    if source.random() < 0.3:
        text = f"{prompts[0]}\n{text}"
    text = text * source.choice((2, 3)) if source.random() < 0.1 else text
    return text[:_LONGEST]


def _parameters(source: random.Random, vocabulary: int, is_structured: bool) -> dict[str, Any]:
    """One way of sampling, an end, and now and then one of the rarer parameters."""
    parameters: dict[str, Any] = {"temperature": 0.0, "max_tokens": source.randint(1, 64)}
    if source.random() < 0.55:
        parameters = {
            **parameters,
            "temperature": round(source.uniform(0.3, 1.3), 2),
            "seed": source.randrange(2**31),
        }
    for draw, share in _RARE:
        if source.random() < share:
            parameters.update(draw(source, vocabulary))
    if "min_tokens" in parameters:
        parameters["min_tokens"] = min(parameters["min_tokens"], parameters["max_tokens"])
    if parameters["temperature"] == 0:
        parameters.pop("n", None)  # vLLM refuses equal outputs
    if is_structured:
        # They would forbid what a grammar asks for.
        for name in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos", "stop"):
            parameters.pop(name, None)
    return parameters


def _tokens(source: random.Random, vocabulary: int, count: int) -> list[int]:
    return source.sample(range(200, vocabulary), count)


_RARE: tuple[tuple[Callable[[random.Random, int], dict[str, Any]], float], ...] = (
    (lambda source, _: {"top_p": round(source.uniform(0.5, 1.0), 2)}, 0.15),
    (lambda source, _: {"top_k": source.choice((1, 2, 20, 100))}, 0.12),
    (lambda source, _: {"min_p": round(source.uniform(0.0, 0.2), 2)}, 0.1),
    (lambda source, _: {"repetition_penalty": round(source.uniform(0.8, 1.5), 2)}, 0.08),
    (lambda source, _: {"presence_penalty": round(source.uniform(-1.0, 1.5), 2)}, 0.06),
    (lambda source, _: {"frequency_penalty": round(source.uniform(-0.3, 1.0), 2)}, 0.06),
    (
        lambda source, vocabulary: {
            "logit_bias": {
                token: round(source.uniform(-10, 4), 1) for token in _tokens(source, vocabulary, 4)
            }
        },
        0.06,
    ),
    (
        lambda source, vocabulary: {
            "allowed_token_ids": sorted(_tokens(source, vocabulary, vocabulary // 2)[:MOST_ALLOWED])
        },
        0.03,
    ),
    (lambda source, _: {"bad_words": source.sample(["self", " in", "return", " def"], 2)}, 0.05),
    (lambda source, _: {"stop": source.sample(["\n\n", "self", ":", ")"], 2)}, 0.1),
    (lambda source, vocabulary: {"stop_token_ids": _tokens(source, vocabulary, 60)}, 0.08),
    (lambda source, _: {"min_tokens": source.randint(1, 20)}, 0.08),
    (lambda _source, _: {"ignore_eos": True}, 0.3),
    (lambda source, _: {"logprobs": source.choice((0, 3))}, 0.08),
    (lambda _source, _: {"n": 2}, 0.05),
)
"""What some requests have besides, and how many of them."""
