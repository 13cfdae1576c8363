"""Requests that think before they answer: between brackets, see `brackets`."""

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support import brackets
from tests.support.engines import running, undrafted, whole_trees
from tests.support.generating import answered, counted
from tests.support.models import prompts

CLOSING = 11
"""The token that ends thinking."""

OPTIONS: dict[str, Any] = {
    "structured_outputs_config": {
        "backend": "xgrammar", "disable_any_whitespace": True,
        "reasoning_parser": "brackets", "reasoning_parser_plugin": brackets.__file__,
    },
    # What a budget forces has three tokens.
    "reasoning_config": {"reasoning_parser": "brackets", "reasoning_end_str": "so\n)"},
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "sizes"],
}
JSON = {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}
CHOICE = {"structured_outputs": StructuredOutputsParams(choice=["return None", "raise ValueError"])}
CHOSEN = [300, 7, 512]
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "json after thinking": JSON,
    "choice after thinking": CHOICE,
    "json while it thinks": {**JSON, "logit_bias": {CLOSING: -100.0}},
    "json, edited": {**JSON, "repetition_penalty": 1.2, "min_tokens": 12},
    "budget of 11": {"thinking_token_budget": 11},
    "no budget": {"thinking_token_budget": 0},
    "budget of 2, edited": {"thinking_token_budget": 2, "repetition_penalty": 1.2},
    "budget never reached": {"thinking_token_budget": 500},
    "budget, then json": {**JSON, "thinking_token_budget": 5, "logit_bias": {CLOSING: -100.0}},
    "chosen logprobs": {"logprob_token_ids": CHOSEN},
    "chosen logprobs, and others": {"logprob_token_ids": CHOSEN, "logprobs": len(CHOSEN)},
}


def greedy_and_seeded(count: int, max_tokens: int, keys: dict[str, Any]) -> list[SamplingParams]:
    """Half of the requests are greedy."""
    return [
        SamplingParams(
            temperature=0.8 * (index % 2), seed=index if index % 2 else None,
            max_tokens=max_tokens, **keys,
        )
        for index in range(count)
    ]  # fmt: skip


def answers(
    config: dict[str, Any] | None, kinds: dict[str, dict[str, Any]], count: int, max_tokens: int,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """By kind: tokens, logprobs, texts and finish reasons of so many requests; and our counts.

    "all" are requests of all kinds in one batch.
    """
    params = {name: greedy_and_seeded(count, max_tokens, keys) for name, keys in kinds.items()}
    params["all"] = [own[place % count] for place, own in enumerate(params.values())]
    found: dict[str, Any] = {}
    with running(config, **{**OPTIONS, **options}) as llm:
        for name, own in params.items():
            texts = [f"{text}(" for text in prompts(len(own))]
            outputs = llm.generate(texts, own, use_tqdm=False)
            found[name] = answered(outputs) | {
                "texts": [output.outputs[0].text for output in outputs],
                "ends": [output.outputs[0].finish_reason for output in outputs],
            }
            if config:
                found[name]["counts"] = counted(llm)
        found["undrafted"] = undrafted(llm) if config else {}
    return found


def both_answers(kinds: list[str], count: int, max_tokens: int) -> dict[str, dict[str, Any]]:
    """`answers` of plain vLLM and of trees, on the runner of this process."""
    asked = {name: KINDS[name] for name in kinds}
    plain = answers(None, asked, count, max_tokens)
    return {"plain": plain, "trees": answers(whole_trees(8), asked, count, max_tokens)}
