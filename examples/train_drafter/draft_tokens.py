"""Which of the target's tokens a draft has, and the tokenizer with these alone.

A draft of a few million parameters cannot spend them on tens of thousands of rare tokens. It
gets the target's most frequent ones. The engine matches tokens of two tokenizers by their text
(docs/vocabularies.md), so that such a draft needs nothing of its own to be served.
"""

import json
from typing import Any

import numpy as np
from errors import PairError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from sequoia_vllm.vocabulary.matching import Matching, match
from sequoia_vllm.vocabulary.tokens import read_vocabulary

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def reduced_tokenizer(target: Any, counts: NDArray[np.int64], size: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer with some of the target's tokens.

    Special tokens and single characters are always among them. A token needs those that it is
    merged from; they come with it.

    Args:
        counts: How often each of its tokens was seen, ``[vocabulary]``.
    """
    backend = getattr(target, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {}
    model = described.get("model", {})
    if model.get("type") != "BPE":
        raise PairError(
            "the target's tokenizer is no byte-pair encoding, which alone can be reduced: keep all "
            "of its tokens, with --tokens 0"
        )
    vocabulary: dict[str, int] = model["vocab"]
    merges = [
        tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"]
    ]
    added = {one["content"] for one in described["added_tokens"]}
    kept = _closed_set(vocabulary, merges, added, counts, size)
    order = sorted(
        kept, key=lambda token: vocabulary.get(token, target.convert_tokens_to_ids(token))
    )
    numbers = {token: number for number, token in enumerate(order)}
    model["vocab"] = {token: numbers[token] for token in order if token in vocabulary}
    model["merges"] = [
        [left, right] for left, right in merges if {left, right, left + right} <= kept
    ]
    for one in described["added_tokens"]:
        one["id"] = numbers[one["content"]]
    _renumber(described.get("post_processor"), numbers)
    from tokenizers import Tokenizer

    names = {role: getattr(target, role) for role in _ROLES if getattr(target, role)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), **names
    )


def _closed_set(
    vocabulary: dict[str, int],
    merges: list[tuple[str, ...]],
    added: set[str],
    counts: NDArray[np.int64],
    size: int,
) -> set[str]:
    """Special tokens, characters, and the most frequent tokens with all that they are made of."""
    parts: dict[str, tuple[str, ...]] = {}
    for pair in merges:
        parts.setdefault("".join(pair), pair)
    kept = added | {token for token in vocabulary if token not in parts}
    if len(kept) > size:
        raise PairError(f"--tokens {size}: special tokens and characters alone are {len(kept)}")

    def missing(token: str) -> set[str]:
        if token in kept:
            return set()
        return {token}.union(*map(missing, parts[token]))

    for token in sorted(vocabulary, key=lambda token: -counts[vocabulary[token]]):
        needed = missing(token)
        if len(kept) + len(needed) <= size:
            kept |= needed
    return kept


def _renumber(part: Any, numbers: dict[str, int]) -> None:
    """Gives the special tokens in a tokenizer's post-processor their new numbers."""
    for one in (part or {}).get("processors", []):
        _renumber(one, numbers)
    for one in ((part or {}).get("special_tokens") or {}).values():
        one["ids"] = [numbers[token] for token in one["tokens"]]


def matching(target: Any, draft: Any, target_size: int, draft_size: int) -> Matching:
    """How the engine will match the tokens of both."""
    known = [read_vocabulary(tokenizer) for tokenizer in (target, draft)]
    if known[0] is None or known[1] is None:
        raise PairError("the tokenizer does not tell what its tokens mean")
    return match(known[0], known[1], target_size, draft_size)


def whole_vocabulary(size: int) -> Matching:
    """Every token is itself."""
    numbers = np.arange(size, dtype=np.int64)
    return Matching(numbers, numbers, np.empty((0, 2), dtype=np.int64))
