"""Greedy answers compared within the rounding that plain vLLM shows against itself.

Plain vLLM scores every answer again: at each token it says its two likeliest ones, and how far the
answer's token is below the best. It also answers each prompt in several ways: alone, in a batch,
without graphs. Where two ways see the same text, the difference of their margins between the two
likeliest tokens is rounding. An engine that chooses another token than plain vLLM is right if the
token is no further below the best one than rounding explains. This holds for each token, also
after the first difference: from there on the answer has a text of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from pydantic import Field

from sequoia_vllm.json_file import FileModel

FACTOR = 2.0
"""Rounding that is allowed, over the largest that was seen. The engine under test rounds like one
more way, and the largest difference of a sample is not the largest there is."""
LEAST = 1e-4
"""Rounding that is always allowed, nats: float32 shows 1e-5."""

Two = Mapping[int, float]
"""The two likeliest tokens at a place, and their log-probabilities (nats)."""


@dataclass(frozen=True)
class Scored:
    """An answer, with what plain vLLM says at each of its tokens."""

    tokens: Sequence[int]
    likeliest: Sequence[Two]  # one for each token
    gaps: Sequence[float] = ()  # nats below the best token; of answers that were scored again


class Rounding(FileModel):
    """How far plain vLLM is from itself."""

    largest: float = Field(ge=0, description="Largest difference of two margins, nats.")
    places: int = Field(ge=0, description="Pairs of margins that were compared.")
    largest_gap: float = Field(ge=0)
    """Largest gap, nats, of plain vLLM's own answers where it scores them again."""

    @property
    def bound(self) -> float:
        """The largest gap, nats, that rounding explains."""
        return max(LEAST, FACTOR * max(self.largest, self.largest_gap))


class Compared(FileModel):
    """Answers of one engine, compared with plain vLLM's."""

    what: str = Field(min_length=1, description="How they were made.")
    answers: int = Field(ge=0)
    identical: int = Field(ge=0, description="Answers with all tokens of plain vLLM's.")
    tokens: int = Field(ge=0)
    largest_gap: float = Field(ge=0, description="Nats below the best token; of all tokens.")
    first_differences: list[float] = Field(default_factory=list)
    """Gaps, nats, of the first token that differs, of each answer that is not identical."""
    short: int = Field(default=0, ge=0, description="Answers that ended too early: an error.")

    def passes(self, bound: float) -> bool:
        """Whether all answers are complete, and no token is further below the best (nats)."""
        return self.answers > 0 and not self.short and self.largest_gap <= bound


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ, or one has ended; None: they are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def measure_rounding(ways: Mapping[str, Sequence[Scored]]) -> Rounding:
    """Compares plain vLLM's ways to answer and to score the same prompts.

    Args:
        ways: Its answers in each way, in the order of the prompts.
    """
    largest, places = 0.0, 0
    for one, other in combinations(ways.values(), 2):
        for a, b in zip(one, other, strict=True):
            for difference in _margin_differences(a, b):
                largest, places = max(largest, difference), places + 1
    gaps = [gap for answers in ways.values() for answer in answers for gap in answer.gaps]
    return Rounding(largest=largest, places=places, largest_gap=max(gaps, default=0.0))


def _margin_differences(one: Scored, other: Scored) -> list[float]:
    """Differences of the two margins, nats, at places with the same text before."""
    end = first_difference(one.tokens, other.tokens)
    # At the first difference itself the text before is still the same.
    end = len(one.tokens) if end is None else end + 1
    found = []
    for a, b in zip(one.likeliest[:end], other.likeliest[:end], strict=False):
        if len(a) >= 2 and a.keys() == b.keys():
            first, second = sorted(a, key=lambda token: -a[token])[:2]
            found.append(abs((a[first] - a[second]) - (b[first] - b[second])))
    return found


def compare(what: str, found: Sequence[Scored], plain: Sequence[Scored], length: int) -> Compared:
    """Compares an engine's answers, scored by plain vLLM, with plain vLLM's own.

    Args:
        plain: Its answers to the same prompts.
        length: Tokens that each answer must have.
    """
    differing = []
    for ours, theirs in zip(found, plain, strict=True):
        place = first_difference(ours.tokens, theirs.tokens)
        if place is not None:
            differing.append(ours.gaps[place] if place < len(ours.gaps) else 0.0)
    return Compared(
        what=what,
        answers=len(found),
        identical=len(found) - len(differing),
        tokens=sum(len(answer.tokens) for answer in found),
        largest_gap=max((gap for answer in found for gap in answer.gaps), default=0.0),
        first_differences=[round(gap, 6) for gap in differing],
        short=sum(len(answer.tokens) != length for answer in found),
    )
