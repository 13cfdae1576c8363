"""Which tokens of two vocabularies mean the same, and how a draft reads all others."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.vocabulary.tokens import Vocabulary

NONE = -1


@dataclass(frozen=True)
class Matching:
    """How token numbers of target and draft belong together."""

    drawn: NDArray[np.int64]
    """int64 ``[Vt]``: the draft's token that means the same as each of the target's; -1: none does,
    and the target's token is never drafted."""
    read: NDArray[np.int64] | None
    """int64 ``[Vt]``: the draft's token that stands for each of the target's where the draft reads
    it; None: the one with its number."""
    also: NDArray[np.int64]
    """int64 ``[E, 2]``: (a draft's token in ``drawn``, another that means the same)."""

    @classmethod
    def of_same_numbers(cls, size: int) -> "Matching":
        """The matching of two models whose tokens have the same numbers."""
        return cls(np.arange(size), None, np.empty((0, 2), dtype=np.int64))

    def trimmed(self, tokens: list[int]) -> tuple[NDArray[np.int64], "Matching"]:
        """The matching with a draft that computes only some rows of its logits.

        Of the target's tokens only ``tokens`` may still be drafted. Returns the rows int64 ``[n]``
        to compute, by the draft's numbers, and the matching: ``drawn`` and ``also`` count them.
        """
        drawn = np.full_like(self.drawn, NONE)
        drawn[tokens] = self.drawn[tokens]
        kept = drawn[drawn != NONE]
        also = self.also[np.isin(self.also[:, 0], kept)]
        rows = np.concatenate([kept, also[:, 1]])
        place = np.zeros(rows.max(initial=0) + 1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        return rows, Matching(np.where(drawn == NONE, NONE, place[drawn]), self.read, place[also])

    @property
    def num_shared(self) -> int:
        """Tokens of the target that can be drafted."""
        return int((self.drawn != NONE).sum())


def match(target: Vocabulary, draft: Vocabulary, target_size: int, draft_size: int) -> Matching:
    """Matches tokens by their text, and those without text by name and role.

    Several tokens of the draft may mean one of the target's: "<0x41>" is "A". A draft that ends
    sequences with another token than the target still ends them. For tokens of the target that none
    of the draft's means, the draft reads the last token of their spelling, or the unknown one.

    Args:
        target_size, draft_size: Rows of their logits, Vt and Vd.
    """
    target, draft = target.within(target_size), draft.within(draft_size)
    meanings = _meanings(target, draft)
    drawn, also = _drawn(meanings, draft, target_size)
    return Matching(drawn, _read(target, draft, drawn), also)


def _meanings(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """The target's token that each of the draft's means, of those that mean one."""
    names, texts = target.by_name(), target.by_text()
    found = {number: names[name] for number, name in draft.controls.items() if name in names}
    found |= {number: texts[text] for number, text in draft.texts.items() if text in texts}
    # In this order: where one token begins and ends sequences, a draft uses it to end them.
    for of_draft, of_target in ((draft.begin, target.begin), (draft.end, target.end)):
        if of_draft is not None and of_target is not None:
            found[of_draft] = of_target
    return found


def _drawn(
    meanings: dict[int, int], draft: Vocabulary, target_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`Matching.drawn` and `Matching.also`."""
    drawn = np.full(target_size, NONE, dtype=np.int64)
    usual = set(draft.by_text().values())
    also = []
    # The draft's usual token of a text first: what else has the text is added to it.
    for number in sorted(meanings, key=lambda number: (number not in usual, number)):
        meant = meanings[number]
        if drawn[meant] == NONE:
            drawn[meant] = number
        else:
            also.append((int(drawn[meant]), number))
    return drawn, np.array(also, dtype=np.int64).reshape(-1, 2)


def _read(target: Vocabulary, draft: Vocabulary, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """`Matching.read`."""
    names, texts = draft.by_name(), draft.by_text()
    segments = Segments(texts)
    known = (draft.unknown, draft.begin, draft.end, 0)
    unknown = next(number for number in known if number is not None)
    read = np.where(drawn == NONE, unknown, drawn)
    for number, name in target.controls.items():
        if name in names:
            read[number] = names[name]
    for number, text in target.texts.items():
        if text in texts:
            read[number] = texts[text]
        elif spelled := segments.split(text):
            read[number] = spelled[-1]
    return read


class Segments:
    """Splits text into tokens, from the left, each as long as there is one.

    Mostly a tokenizer does so with the short text of another's token. Tokenizers themselves put
    spaces before it, or take bytes that are no whole character for something else.

    Args:
        tokens: Number of the token of each text, of at least one byte.
    """

    def __init__(self, tokens: Mapping[bytes, int]) -> None:
        self._tokens = tokens
        self._longest = max(map(len, tokens), default=0)

    def split(self, text: bytes) -> list[int] | None:
        """The tokens whose texts, one after another, are this text; None: some byte has none."""
        found = []
        start = 0
        while start < len(text):
            end = min(start + self._longest, len(text))
            while end > start and text[start:end] not in self._tokens:
                end -= 1
            if end == start:
                return None
            found.append(self._tokens[text[start:end]])
            start = end
        return found
