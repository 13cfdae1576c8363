"""Tokens per step of vLLM's chains without a draft model, along answers that were sampled before.

Their drafts are certain, so vLLM accepts exactly those that the target samples, whatever the
temperature. CPUs where vLLM's chains sample wrongly are measured by this.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

Propose = Callable[[int, list[int], list[int]], list[int]]
"""``(request, prompt, answer so far) -> drafts``."""


def replayed(propose: Propose, prompts: Sequence[list[int]], answers: Sequence[list[int]],
             lengths: Sequence[int]) -> list[list[int]]:  # fmt: skip
    """Tokens that each step of each request would have given, with the prompt's first.

    Args:
        propose: `proposer`.
        prompts: Token ids of requests, which run one after another.
        answers: Their tokens, with more of them behind the end: the last step counts whole.
        lengths: Tokens of each answer up to its end.
    """
    found = []
    for request, (prompt, answer, length) in enumerate(zip(prompts, answers, lengths, strict=True)):
        steps, done = [1], 1
        while done < length:
            drafts = propose(request, prompt, answer[:done])
            right = [draft == token for draft, token in zip(drafts, answer[done:], strict=False)]
            accepted = right.index(False) if False in right else len(right)
            steps.append(min(accepted + 1, len(answer) - done))
            done += steps[-1]
        found.append(steps)
    return found


def proposer(config: dict[str, Any]) -> Propose:
    """What vLLM drafts with a speculative configuration of method "ngram" or "suffix"."""
    count = config["num_speculative_tokens"]
    if config["method"] == "ngram":
        return _ngram(config["prompt_lookup_min"], config["prompt_lookup_max"], count)
    return _suffix(count)


def _ngram(shortest: int, longest: int, count: int) -> Propose:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    def propose(_: int, prompt: list[int], answer: list[int]) -> list[int]:
        text = np.array([*prompt, *answer], dtype=np.int32)
        drafts = _find_longest_matched_ngram_and_propose_tokens(
            text, shortest, longest, len(text) + count, count
        )
        return [int(draft) for draft in drafts]

    return propose


def _suffix(count: int) -> Propose:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
    from vllm.config import SpeculativeConfig

    name = "suffix_decoding_"
    defaults: dict[str, Any] = {
        field.name.removeprefix(name): field.default
        for field in fields(SpeculativeConfig)
        if field.name.startswith(name)
    }
    depth = defaults["max_tree_depth"]
    cache = SuffixDecodingCache(depth, defaults["max_cached_requests"])
    read: dict[int, int] = {}  # tokens of each answer that the cache has

    def propose(request: int, prompt: list[int], answer: list[int]) -> list[int]:
        if request not in read:
            for earlier in list(cache.active_requests):
                cache.stop_request(earlier)
            cache.start_request(request, np.array(prompt, dtype=np.int32))
        new = answer[read.get(request, 0) :]
        read[request] = len(answer)
        cache.add_active_response(request, new)
        drafts = cache.speculate(
            request, np.array([*prompt, *answer][-depth:], dtype=np.int32), max_spec_tokens=count,
            max_spec_factor=defaults["max_spec_factor"], min_token_prob=defaults["min_token_prob"],
        )  # fmt: skip
        return list(drafts.token_ids)

    return propose
