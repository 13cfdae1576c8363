"""Whether sampled tokens follow the target's law: a test with a stated false-alarm rate.

Plain vLLM scores every sampled token: its likeliest tokens at that place, with probabilities. Line
up all tokens by probability, each with a length equal to it: the sampled token lies somewhere in
[0, 1]. Take a random point within its length. Whatever the distributions are, these points are
independent and uniform if, and only if, tokens follow the law. So tokens of all contexts can be
counted together, in cells of equal probability. Tokens below the likeliest ones are one long piece.

Any order of a context's tokens will do. A wrong residual favours tokens that the draft likes more,
or less, than the target does. Those are likely ones in one context and unlikely ones in the next:
the order by probability hides it. Where the draft can be asked, tokens are lined up a second time,
by how much more the draft likes them than the target does.

Four chi-square tests share the false-alarm rate. The first two count points, in both orders. The
third counts pairs of consecutive points: it sees randomness that is used twice. The fourth counts
pairs of two requests with the same prompt: it sees requests that draw alike.
"""

import math
import random
from collections.abc import Mapping, Sequence

from pydantic import Field

from sequoia_vllm.json_file import FileModel

FALSE_ALARM = 1e-4
"""How often the whole test fails an engine that follows the law."""
LEAST_EXPECTED = 5.0  # expected points of a cell, so that the chi-square law holds
BY_DRAFT = "tokens by what the draft likes"
_CELLS, _SIDE = 20, 5  # cells of single points, and along each side of pairs
_CELLS_BY_DRAFT = 10  # a wrong residual leans one way: larger cells see it with fewer tokens
_SEED = 20240219


class LawTest(FileModel):
    """One chi-square test."""

    what: str
    counted: int = Field(ge=0, description="Points or pairs.")
    cells: int = Field(ge=0)
    statistic: float = Field(ge=0)
    p_value: float = Field(ge=0, le=1)


class Law(FileModel):
    """The test of one engine's sampled tokens."""

    what: str
    false_alarm: float = FALSE_ALARM
    tokens: int = Field(ge=0)
    tests: list[LawTest]

    @property
    def p_value(self) -> float:
        """The smallest of the tests', times their number."""
        return min([1.0, *(len(self.tests) * test.p_value for test in self.tests)])

    @property
    def passed(self) -> bool:
        """Whether the tokens may follow the law, and were enough to tell."""
        return bool(self.tests) and self.p_value >= self.false_alarm


def place_of(
    token: int, likeliest: Mapping[int, float], uniform: float,
    drafted: Mapping[int, float] | None = None,
) -> float:  # fmt: skip
    """A token's point in [0, 1] (see the module).

    Args:
        likeliest: Log-probabilities (nats) of the likeliest tokens; of `token` only if it is one.
        uniform: A random number in [0, 1).
        drafted: Log-probabilities (nats) of the draft's likeliest tokens, to order by them.
    """
    before = 0.0
    order = {other: -logprob for other, logprob in likeliest.items()}
    if drafted:
        least = min(drafted.values())  # the others have no more
        order = {other: p - drafted.get(other, least) for other, p in likeliest.items()}
    for other, logprob in sorted(likeliest.items(), key=lambda item: (order[item[0]], item[0])):
        length = math.exp(logprob)
        if other == token:
            return min(before + uniform * length, 1.0)
        before = min(before + length, 1.0)
    return before + uniform * (1.0 - before)


def check_law(
    what: str,
    tokens: Sequence[Sequence[int]],
    likeliest: Sequence[Sequence[Mapping[int, float]]],
    samples: int,
    drafted: Sequence[Sequence[Mapping[int, float]]] = (),
) -> Law:
    """Tests sampled answers.

    Args:
        tokens: Of each answer; ``samples`` consecutive ones, an even number, have the same prompt.
        likeliest: At each token of each answer, see `place_of`.
        drafted: The draft's, likewise; empty: it cannot be asked.
    """
    chance = random.Random(_SEED)
    rows = [
        [place_of(token, at, chance.random()) for token, at in zip(answer, places, strict=True)]
        for answer, places in zip(tokens, likeliest, strict=True)
    ]
    points = [point for row in rows for point in row]
    following = [pair for row in rows for pair in zip(row[::2], row[1::2], strict=False)]
    # Rows 0 and 1, 2 and 3, ... have the same prompt, and no row is in two pairs.
    beside = [
        pair
        for first in range(0, len(rows) - 1, 2 if samples % 2 == 0 else len(rows))
        for pair in zip(rows[first], rows[first + 1], strict=False)
    ]
    by_draft = [
        place_of(token, at, chance.random(), draft)
        for answer, places, drafts in zip(tokens, likeliest, drafted, strict=bool(drafted))
        for token, at, draft in zip(answer, places, drafts, strict=True)
    ]
    tests = [
        _chi_square("tokens by probability", [_cell(point, _CELLS) for point in points], _CELLS),
        _chi_square(
            BY_DRAFT, [_cell(point, _CELLS_BY_DRAFT) for point in by_draft], _CELLS_BY_DRAFT
        ),
        _chi_square("consecutive tokens", [_pair_cell(pair) for pair in following], _SIDE**2),
        _chi_square("two requests with one prompt", [_pair_cell(p) for p in beside], _SIDE**2),
    ]
    return Law(what=what, tokens=len(points), tests=[test for test in tests if test is not None])


def _cell(point: float, cells: int) -> int:
    return min(int(point * cells), cells - 1)


def _pair_cell(pair: tuple[float, float]) -> int:
    return _SIDE * _cell(pair[0], _SIDE) + _cell(pair[1], _SIDE)


def _chi_square(what: str, found: Sequence[int], cells: int) -> LawTest | None:
    """Tests counts of equally likely cells; None: too few to tell."""
    expected = len(found) / cells
    if expected < LEAST_EXPECTED:
        return None
    counts = [0] * cells
    for cell in found:
        counts[cell] += 1
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    return LawTest(
        what=what,
        counted=len(found),
        cells=cells,
        statistic=round(statistic, 3),
        p_value=chance_of(statistic, cells - 1),
    )


def chance_of(statistic: float, freedom: int) -> float:
    """Probability that a chi-square statistic is at least so large."""
    import torch  # of vLLM: scipy is no dependency

    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]).clamp(0.0, 1.0))
