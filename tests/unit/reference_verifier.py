"""Slow, obvious references for drafting and verification, and the laws they have.

One request at a time, plain Python. Numbers may be `fractions.Fraction`: then
`exact_law` follows every outcome of drafting and verification and gives its
probability exactly, so that losslessness is an equation and not a statistic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any, Protocol

import numpy as np
from scipy.stats import chi2

Number = Any  # float or Fraction
Distribution = list[Number]
Model = Callable[[tuple[int, ...]], Distribution]  # tokens after the root -> next token's law


class Chance(Protocol):
    """Where the randomness comes from."""

    def accepts(self, probability: Number, node: int) -> bool: ...
    def draw(self, distribution: Distribution) -> int: ...


# -- Algorithm 2 -----------------------------------------------------------------


def children_of(parents: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def norm(weights: Distribution) -> Distribution:
    total = sum(weights)
    return [weight / total for weight in weights]


def without(distribution: Distribution, removed: Sequence[int]) -> Distribution:
    """The last of ``removed`` taken out; uniform over what is not removed if nothing is left."""
    rest = list(distribution)
    rest[removed[-1]] = 0 * rest[removed[-1]]
    if sum(rest) == 0:
        rest = [0 if token in removed else 1 + 0 * p for token, p in enumerate(rest)]
    return norm(rest) if sum(rest) else rest


def algorithm_2(
    target: Callable[[int], Distribution],
    draft: Callable[[int], Distribution],
    tokens: Sequence[int],
    parents: Sequence[int],
    chance: Chance,
) -> tuple[list[int], list[int]]:
    """Accepted nodes and emitted tokens; ``target(node)`` is P there, ``draft(node)`` Q."""
    node, accepted, emitted = 0, [], []
    while True:
        R = list(target(node))  # noqa: N806
        children = children_of(parents, node)
        D = list(draft(node)) if children else []  # noqa: N806
        for rank, child in enumerate(children):
            x = tokens[child]
            ratio = R[x] / D[x] if D[x] else (1 if R[x] else 0)
            if chance.accepts(min(ratio, 1), child):
                node = child
                accepted.append(child)
                emitted.append(x)
                break
            left = [max(r - d, 0) for r, d in zip(R, D, strict=True)]
            # Exactly nothing is left only after a child that Q cannot have drawn.
            R = norm(left) if sum(left) else R  # noqa: N806
            D = without(D, [tokens[c] for c in children[: rank + 1]])  # noqa: N806
        else:
            emitted.append(chance.draw(R))
            return accepted, emitted


def match(
    target_token: Callable[[int, int], int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Accepted nodes and emitted tokens where the target's next token is given."""
    node, accepted, emitted = 0, [], []
    while True:
        emitted.append(target_token(node, len(accepted)))
        hits = [c for c in children_of(parents, node) if tokens[c] == emitted[-1]]
        if not hits:
            return accepted, emitted
        node = hits[0]
        accepted.append(node)


# -- drafting ----------------------------------------------------------------------


def path_tokens(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node > 0:
        path = (tokens[node], *path)
        node = parents[node]
    return path


def draft_tree(draft: Model, parents: Sequence[int], chance: Chance) -> list[int]:
    """Tokens of the tree's nodes, siblings drawn one by one without replacement."""
    tokens = [0] * len(parents)
    for node in range(len(parents)):
        children = children_of(parents, node)
        D = list(draft(path_tokens(tokens, parents, node)))  # noqa: N806
        for rank, child in enumerate(children):
            tokens[child] = chance.draw(D)
            D = without(D, [tokens[c] for c in children[: rank + 1]])  # noqa: N806
    return tokens


def plackett_luce(weights: Distribution, k: int) -> dict[tuple[int, ...], Number]:
    """Probability of each ordered draw of ``k`` tokens without replacement."""

    def draws(chance: Chance) -> tuple[int, ...]:
        parents = [-1] + [0] * k
        return tuple(draft_tree(lambda path: norm(weights), parents, chance)[1:])

    return dict(outcomes(draws))


# -- sources of chance ---------------------------------------------------------------


@dataclass
class Uniforms:
    """One number per node: the node's own decides it, the root's draws the last token."""

    values: Sequence[float]

    def accepts(self, probability: Number, node: int) -> bool:
        return self.values[node] < probability

    def draw(self, distribution: Distribution) -> int:
        threshold = self.values[0] * sum(distribution)
        return next(t for t in range(len(distribution)) if sum(distribution[: t + 1]) > threshold)


@dataclass
class Script:
    """Follows a list of choices, then takes the first possible one; notes the others."""

    choices: list[int]
    probability: Number = Fraction(1)
    alternatives: list[list[int]] = field(default_factory=list)
    position: int = 0

    def choose(self, distribution: Distribution) -> int:
        possible = [i for i, p in enumerate(distribution) if p > 0]
        if self.position == len(self.choices):
            self.alternatives += [[*self.choices, other] for other in possible[1:]]
            self.choices = [*self.choices, possible[0]]
        choice = self.choices[self.position]
        self.position += 1
        self.probability *= distribution[choice]
        return choice

    def accepts(self, probability: Number, node: int) -> bool:
        return self.choose([1 - probability, probability]) == 1

    def draw(self, distribution: Distribution) -> int:
        return self.choose(distribution)


def outcomes(experiment: Callable[[Chance], Any]) -> Iterator[tuple[Any, Number]]:
    """Every result the experiment can have, each with its probability, added up."""
    law: dict[Any, Number] = defaultdict(Fraction)
    scripts: list[list[int]] = [[]]
    while scripts:
        script = Script(scripts.pop())
        law[experiment(script)] += script.probability
        scripts += script.alternatives
    yield from law.items()


# -- laws ----------------------------------------------------------------------------


def autoregressive_law(target: Model, vocabulary: int, length: int) -> dict[tuple, Number]:
    """The law of ``length`` tokens sampled from the target one at a time."""
    law = {}
    for tokens in product(range(vocabulary), repeat=length):
        probability: Number = Fraction(1)
        for i, token in enumerate(tokens):
            probability = probability * target(tokens[:i])[token]
        law[tokens] = probability
    return law


def exact_law(
    target: Model, draft: Model, parents: Sequence[int], vocabulary: int, length: int
) -> dict[tuple, Number]:
    """The law of drafting a tree, verifying it, and sampling the target up to ``length``."""

    def experiment(chance: Chance) -> tuple[int, ...]:
        tokens = draft_tree(draft, parents, chance)
        _, emitted = algorithm_2(
            lambda node: target(path_tokens(tokens, parents, node)),
            lambda node: draft(path_tokens(tokens, parents, node)),
            tokens,
            parents,
            chance,
        )
        return tuple(emitted)

    law: dict[tuple, Number] = dict.fromkeys(product(range(vocabulary), repeat=length), Fraction(0))
    for emitted, probability in outcomes(experiment):
        rest = length - len(emitted)
        tail = autoregressive_law(lambda path, e=emitted: target(e + path), vocabulary, rest)
        for tokens, factor in tail.items():
            law[emitted + tokens] += probability * factor
    return law


def assert_same_law(
    counts: np.ndarray, probabilities: np.ndarray, false_alarm: float = 1e-6
) -> None:
    """Pearson's chi-square test; impossible cells must be empty.

    A correct sampler with fresh seeds fails it once in ``1 / false_alarm`` runs.
    """
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities, float)
    assert abs(probabilities.sum() - 1) < 1e-5
    assert counts[probabilities == 0].sum() == 0, "an outcome of probability 0 came up"
    expected = probabilities * counts.sum()
    # Cells with few counts are not chi-square distributed: they are taken together.
    small = expected < 10
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 10:
        observed[:-1][expected[:-1].argmin()] += observed[-1]
        expected[:-1][expected[:-1].argmin()] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    p_value = chi2.sf(statistic, len(expected) - 1) if len(expected) > 1 else 1.0
    assert p_value > false_alarm, f"chi-square {statistic:.1f} of {len(expected)} cells: {p_value}"
