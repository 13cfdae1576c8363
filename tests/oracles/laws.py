"""Laws of what is emitted: exactly, by following every outcome, and from counts, by chi-square.

That a rule of verification is lossless is an equation in fractions::

    exact_law(target, draft, parents, vocabulary, length)
        == autoregressive_law(target, vocabulary, length)

and that an implementation follows it is `assert_same_law` of the counts of what it emitted.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles.verification import (
    Chance,
    Distribution,
    Model,
    Number,
    Weights,
    acceptance_probability,
    algorithm_2,
    children_of,
    draft_tree,
    draw_without_replacement,
    normalized,
    path_tokens,
)

Tokens = tuple[int, ...]
Verifier = Callable[..., tuple[list[int], list[int]]]
"""A rule of verification, called as `algorithm_2` is."""
Outcome = TypeVar("Outcome", bound=Hashable)

# -- every outcome -------------------------------------------------------------------


@dataclass
class Script:
    """A `Chance` that follows a list of choices, then takes the first possible one.

    Attributes:
        choices: Made so far.
        probability: Of all of them.
        alternatives: Lists of choices that were possible instead.
        position: The next choice.
    """

    choices: list[int]
    probability: Number = Fraction(1)
    alternatives: list[list[int]] = field(default_factory=list)
    position: int = 0

    def choose(self, distribution: Weights) -> int:
        """One of the outcomes that have a probability."""
        possible = [outcome for outcome, weight in enumerate(distribution) if weight > 0]
        if self.position == len(self.choices):
            self.alternatives += [[*self.choices, other] for other in possible[1:]]
            self.choices = [*self.choices, possible[0]]
        choice = self.choices[self.position]
        self.position += 1
        self.probability *= distribution[choice]
        return choice

    def accepts(self, target: Number, draft: Number, node: int) -> bool:
        """Both, one after the other."""
        probability = acceptance_probability(target, draft)
        return self.choose([1 - probability, probability]) == 1

    def draw(self, distribution: Distribution, node: int) -> int:
        """Every possible token, one after the other."""
        return self.choose(distribution)


def outcomes(experiment: Callable[[Chance], Outcome]) -> dict[Outcome, Number]:
    """Every result that the experiment can have, with its probability.

    Args:
        experiment: Called once for each way that chance can go.
    """
    law: dict[Outcome, Number] = defaultdict(Fraction)
    scripts: list[list[int]] = [[]]
    while scripts:
        script = Script(scripts.pop())
        law[experiment(script)] += script.probability
        scripts += script.alternatives
    return dict(law)


def plackett_luce(weights: Weights, count: int) -> dict[Tokens, Number]:
    """Probability of each ordered draw of ``count`` tokens without replacement."""

    def draws(chance: Chance) -> Tokens:
        return tuple(
            draw_without_replacement(normalized(weights), count, lambda rest: chance.draw(rest, 0))
        )

    return outcomes(draws)


def autoregressive_law(target: Model, vocabulary: int, length: int) -> dict[Tokens, Number]:
    """Probability of each ``length`` tokens, sampled from the target one at a time."""
    law = {}
    for tokens in product(range(vocabulary), repeat=length):
        probability: Number = Fraction(1)
        for place, token in enumerate(tokens):
            probability = probability * target(tokens[:place])[token]
        law[tokens] = probability
    return law


def emitted_law(
    target: Model, draft: Model, parents: list[int], verifier: Verifier = algorithm_2
) -> dict[Tokens, Number]:
    """Probability of everything that a step can emit, by drafting a tree and verifying it."""

    def experiment(chance: Chance) -> Tokens:
        tokens = draft_tree(draft, parents, chance)
        _, emitted = verifier(
            lambda node: target(path_tokens(tokens, parents, node)),
            lambda node: draft(path_tokens(tokens, parents, node)),
            tokens,
            children_of(parents),
            chance,
        )
        return tuple(emitted)

    return outcomes(experiment)


def expected_tokens(emitted: dict[Tokens, Number]) -> Number:
    """Tokens per step, by such a law."""
    return sum(probability * len(tokens) for tokens, probability in emitted.items())


def exact_law(
    target: Model,
    draft: Model,
    parents: list[int],
    vocabulary: int,
    length: int,
    verifier: Verifier = algorithm_2,
) -> dict[Tokens, Number]:
    """Probability of each ``length`` tokens by a step with a tree, and then the target.

    Args:
        length: At least one more than the tree is deep; what is emitted is continued up
            to it by sampling the target.
    """
    law: dict[Tokens, Number] = dict.fromkeys(
        product(range(vocabulary), repeat=length), Fraction(0)
    )
    for emitted, probability in emitted_law(target, draft, parents, verifier).items():

        def after(path: Tokens, emitted: Tokens = emitted) -> Weights:
            return target(emitted + path)

        tail = autoregressive_law(after, vocabulary, length - len(emitted))
        for tokens, factor in tail.items():
            law[emitted + tokens] += probability * factor
    return law


# -- counts --------------------------------------------------------------------------


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's chi-square statistic of some counts.

    Attributes:
        statistic: Infinite where an impossible outcome came up.
        freedom: Degrees of freedom: one fewer than there were cells.
    """

    statistic: float
    freedom: int

    @property
    def p_value(self) -> float:
        """How often counts by the expected law would be as far from it."""
        from scipy.special import chdtrc  # which the check on GPUs neither has nor needs

        return float(chdtrc(max(self.freedom, 1), self.statistic))

    @property
    def deviations(self) -> float:
        """Standard deviations above what counts by the expected law have on average."""
        freedom = max(self.freedom, 1)
        return (self.statistic - freedom) / math.sqrt(2 * freedom)


def chi_square(counts: ArrayLike, expected: ArrayLike, fewest: float = 10.0) -> ChiSquare:
    """Compares counts of outcomes with what is expected of each.

    Args:
        expected: Of the same shape and sum.
        fewest: Outcomes expected less often are taken together, as few counts are not
            chi-square distributed; if they are too few still, with the rarest other one.

    Raises:
        ValueError: Shapes or sums differ.
    """
    found, wanted = np.asarray(counts, float), np.asarray(expected, float)
    if found.shape != wanted.shape:
        raise ValueError(f"counts are {found.shape}, but {wanted.shape} are expected")
    if abs(wanted.sum() - found.sum()) > 1e-6 * max(found.sum(), 1):
        raise ValueError(f"{found.sum():g} were counted, but {wanted.sum():g} are expected")
    possible = wanted > 0
    if found[~possible].any():
        return ChiSquare(math.inf, 0)
    found, wanted = found[possible], wanted[possible]
    rare = wanted < fewest
    if rare.any():
        found = np.append(found[~rare], found[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
        if wanted[-1] < fewest and len(wanted) > 1:
            rarest = wanted[:-1].argmin()
            found[rarest] += found[-1]
            wanted[rarest] += wanted[-1]
            found, wanted = found[:-1], wanted[:-1]
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    return ChiSquare(statistic, max(len(wanted) - 1, 0))


def assert_same_law(
    counts: ArrayLike, probabilities: ArrayLike, false_alarm: float = 1e-6, fewest: float = 10.0
) -> None:
    """Outcomes come up as often as they should, and impossible ones never.

    Args:
        counts: Of each outcome, any shape.
        probabilities: Of each outcome.
        false_alarm: In how many runs, with fresh seeds, a correct sampler fails.
        fewest: As of `chi_square`.

    Raises:
        AssertionError: They do not.
        ValueError: The probabilities do not sum to 1, or are for other outcomes.
    """
    law = np.asarray(probabilities, float)
    if abs(law.sum() - 1) > 1e-6:
        raise ValueError(f"the probabilities sum to {law.sum()}")
    found = chi_square(counts, law * np.asarray(counts, float).sum(), fewest)
    if math.isinf(found.statistic):
        raise AssertionError("an outcome of probability 0 came up")
    if found.p_value <= false_alarm:
        raise AssertionError(
            f"chi-square {found.statistic:.1f} of {found.freedom + 1} cells: p {found.p_value:.1e}"
        )


def assert_draws(tokens: ArrayLike, weights: Weights, fewest: float = 10.0) -> None:
    """Rows of ``[samples, count]`` are ordered draws without replacement from these weights."""
    drawn = Counter(map(tuple, np.asarray(tokens).tolist()))
    law = plackett_luce(weights, np.shape(tokens)[1])
    assert drawn.keys() <= law.keys(), "an outcome of probability 0 came up"
    assert_same_law([drawn[draw] for draw in law], list(law.values()), fewest=fewest)
