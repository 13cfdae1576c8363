"""Requests whose logits are edited, so that it shows in what they would give."""

from typing import Any

from vllm import SamplingParams

# Nodes on the likeliest path have others before them that are not on it.
SIBLINGS_FIRST = [-1, 0, 0, 0, 1, 1, 4, 4, 6, 6]


def edits_against(tokens: list[int], vocabulary: int) -> dict[str, dict[str, Any]]:
    """Sampling parameters, by name, each of which forbids or moves some of
    these (at least nine, that a request gives without edits)."""
    t = tokens
    return {
        "repetition": {"repetition_penalty": 1.6},
        "presence": {"presence_penalty": -2.0},
        "frequency": {"frequency_penalty": -1.5},
        "logit bias": {"logit_bias": {t[0]: -3.0, t[5]: 2.0}},
        "bad words": {
            "_bad_words_token_ids": [[t[1]], [t[2], t[3]], [t[4], t[5], t[6]], [t[0], t[2]]]
        },
        "min tokens": {"min_tokens": 8, "stop_token_ids": [t[1], t[3], t[4]], "ignore_eos": False},
        "allowed": {"allowed_token_ids": [one for one in range(vocabulary) if one % 3 != t[2] % 3]},
        "all": {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "logit_bias": {t[0]: -3.0},
            "_bad_words_token_ids": [[t[1]], [t[2], t[3]]],
            "min_tokens": 5,
            "stop_token_ids": [t[4]],
            "ignore_eos": False,
            "allowed_token_ids": [one for one in range(vocabulary) if one % 7 != t[3] % 7],
        },
    }


def edited_params(plain: list[int], max_tokens: int, vocabulary: int) -> dict[str, Any]:
    """Greedy and seeded `SamplingParams` of each of `edits_against`, by name."""
    found = {}
    for name, edit in edits_against(plain, vocabulary).items():
        common = {
            "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, "logprobs": 1, **edit
        }  # fmt: skip
        found[f"{name}, greedy"] = SamplingParams(temperature=0, **common)
        found[f"{name}, seeded"] = SamplingParams(temperature=0.7, seed=3, **common)
    return found
