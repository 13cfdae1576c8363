"""Drafting and verification as the Sequoia paper (arXiv 2402.12374) writes them, tree by tree.

Distributions are arrays ``[V]``, or lists, of floats or of `fractions.Fraction`: then nothing
is rounded, and `tests.oracles.laws.exact_law` shows that a rule is lossless by an
equation.

A verifier of your own is right if it takes the same decisions from the same numbers::

    accepted, emitted = algorithm_2(
        lambda node: target_probabilities[node],
        lambda node: draft_probabilities[node],
        tokens,
        children_of(parents),
        Uniforms(numbers),
    )
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Number = Any
"""A float or a `fractions.Fraction`."""
Distribution = NDArray[Any]
"""Probabilities ``[V]``."""
Weights = Sequence[Number] | Distribution
"""A distribution, or what becomes one when it is divided by its sum; ``[V]``."""
Model = Callable[[tuple[int, ...]], Weights]
"""The next token's law after these tokens, which follow the root's."""


class Chance(Protocol):
    """Where the randomness comes from."""

    def accepts(self, target: Number, draft: Number, node: int) -> bool:
        """Whether a drafted node is accepted, whose token has these probabilities left.

        True with `acceptance_probability`, ``min(1, target / draft)``.
        """

    def draw(self, distribution: Distribution, node: int) -> int:
        """A token by this law, to follow ``node``."""


@dataclass
class Uniforms:
    """One number in [0, 1) per node: the node's own decides it, the root's draws the last token."""

    values: Sequence[float]

    def accepts(self, target: Number, draft: Number, node: int) -> bool:
        """Where the node's number is below the probability."""
        return bool(self.values[node] < acceptance_probability(target, draft))

    def draw(self, distribution: Distribution, node: int) -> int:
        """By inversion, in the order of the tokens."""
        cumulative = np.cumsum(distribution)
        return int((cumulative > self.values[0] * cumulative[-1]).argmax())


# -- probabilities -------------------------------------------------------------------


def acceptance_probability(target: Number, draft: Number) -> Number:
    """``min(1, target / draft)``; without any draft probability 1, or 0 where both are 0."""
    zero = 0 * draft  # of the numbers' own kind
    return min(target / draft, zero + 1) if draft else zero + (target > 0)


def normalized(weights: Weights) -> Distribution:
    """The distribution that is proportional to these weights; their sum is not 0."""
    weights = np.asarray(weights)
    return weights / weights.sum()


def without(distribution: Weights, removed: Sequence[int]) -> Distribution:
    """What is left once the last token of ``removed`` is drawn, too.

    Args:
        distribution: From which all but the last of them are taken out.
        removed: Tokens drawn so far. Where nothing else has a probability, all other
            tokens are equally likely; all 0 if there are none.
    """
    rest = np.array(distribution)
    rest[removed[-1]] = 0
    if rest.sum() == 0:
        rest = 0 * rest + 1
        rest[list(removed)] = 0
    return normalized(rest) if rest.any() else rest


# -- drafting ------------------------------------------------------------------------


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """The children of each node, in draft order; node 0 is the root, whose parent is -1."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def path_tokens(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Tokens from below the root down to ``node``."""
    path: tuple[int, ...] = ()
    while node > 0:
        path = (tokens[node], *path)
        node = parents[node]
    return path


def draw_without_replacement(
    distribution: Weights, count: int, draw: Callable[[Distribution], int]
) -> list[int]:
    """Siblings, drawn one by one from what is left of the draft's distribution.

    Args:
        distribution: Q, ``[V]``.
        count: Tokens to draw, at most V; see `without` for more than Q makes possible.
    """
    drawn: list[int] = []
    remaining = np.asarray(distribution)
    for _ in range(count):
        drawn.append(draw(remaining))
        remaining = without(remaining, drawn)
    return drawn


def draft_tree(draft: Model, parents: Sequence[int], chance: Chance) -> list[int]:
    """Tokens of the tree's nodes; the root's, which nothing depends on, is 0."""
    tokens = [0] * len(parents)
    for node, children in enumerate(children_of(parents)):
        if children:
            law = draft(path_tokens(tokens, parents, node))

            def draw(remaining: Distribution, node: int = node) -> int:
                return chance.draw(remaining, node)

            for child, token in zip(
                children, draw_without_replacement(law, len(children), draw), strict=True
            ):
                tokens[child] = token
    return tokens


# -- verification --------------------------------------------------------------------


def algorithm_2(
    target: Callable[[int], Weights],
    draft: Callable[[int], Weights],
    tokens: Sequence[int],
    children: Sequence[Sequence[int]],
    chance: Chance,
) -> tuple[list[int], list[int]]:
    """The paper's Algorithm 2: a walk down one tree.

    Args:
        target: P at a node, ``[V]``.
        draft: Q at a node with children, ``[V]``.
        tokens: Of each node.
        children: Of each node, in draft order (`children_of`, `TokenTree.children`).
        chance: Decides, and draws the last token.

    Returns:
        Accepted nodes, and emitted tokens: theirs and one more.
    """
    node = 0
    accepted: list[int] = []
    emitted: list[int] = []
    while True:
        residual = np.array(target(node))  # the paper's R
        remaining = np.array(draft(node)) if children[node] else residual  # its D
        rejected: list[int] = []
        for child in children[node]:
            token = tokens[child]
            if chance.accepts(residual[token], remaining[token], child):
                node = child
                accepted.append(child)
                emitted.append(token)
                break
            left = np.maximum(residual - remaining, 0)
            # Exactly nothing is left only after a child that Q cannot have drawn.
            residual = normalized(left) if left.any() else residual
            rejected.append(token)
            remaining = without(remaining, rejected)
        else:
            emitted.append(chance.draw(residual, node))
            return accepted, emitted


def chance_after_rejection(
    mass: Number, chance_of_path: Number, remaining: Distribution, token: int
) -> Number:
    """What traversal passes on to a node's later children, and to the node itself.

    Args:
        mass: What is left of P, scaled by the chance of the path, once Q is taken off.
        chance_of_path: As it was when the rejected child was drawn.
        remaining: What Q was then.
        token: The rejected child's. Neither matters: they are for wrong rules.
    """
    if mass:
        return mass / (mass + 1 - chance_of_path)
    # Impossible; or still certain, after a child that Q cannot have drawn.
    return chance_of_path * (chance_of_path >= 1)


def traversal(
    target: Callable[[int], Weights],
    draft: Callable[[int], Weights],
    tokens: Sequence[int],
    children: Sequence[Sequence[int]],
    chance: Chance,
) -> tuple[list[int], list[int]]:
    """Traversal verification (arXiv 2505.12398): all of a tree, leaves first.

    A node is tried after the last of its children was rejected. What is passed down to a
    child is the probability ``a`` that its path may be accepted: of the whole tree's path
    at once, which is never less than one decision after another gives.

    Args:
        target, draft, tokens, children, chance: As of `algorithm_2`.

    Returns:
        As `algorithm_2`.
    """

    def visit(node: int, chance_of_path: Number) -> tuple[list[int], list[int]] | None:
        """The path below ``node`` that is accepted, the node at its front; None: not even it."""
        residual = np.array(target(node))  # M
        remaining = np.array(draft(node)) if children[node] else residual  # D
        rejected: list[int] = []
        for child in children[node]:
            token = tokens[child]
            found = visit(
                child, acceptance_probability(chance_of_path * residual[token], remaining[token])
            )
            if found is not None:
                return [child, *found[0]], [token, *found[1]]
            left = np.maximum(chance_of_path * residual - remaining, 0)
            mass = left.sum()
            residual = left / mass if mass else residual
            chance_of_path = chance_after_rejection(mass, chance_of_path, remaining, token)
            rejected.append(token)
            remaining = without(remaining, rejected)
        if node > 0 and not chance.accepts(chance_of_path, 1, node):
            return None
        return [], [chance.draw(residual, node)]

    found = visit(0, 1)
    assert found is not None  # the root's chance stays 1
    return found


def match(
    target_token: Callable[[int, int], int],
    tokens: Sequence[int],
    children: Sequence[Sequence[int]],
) -> tuple[list[int], list[int]]:
    """The walk of a tree where the target's next token is given, as in greedy decoding.

    Args:
        target_token: The target's token after a node, called with its depth, too.
        tokens: Of each node.
        children: Of each node, in draft order; of two with one token the first is taken.

    Returns:
        Accepted nodes, and emitted tokens: theirs and one more.
    """
    node = 0
    accepted: list[int] = []
    emitted: list[int] = []
    while True:
        emitted.append(target_token(node, len(accepted)))
        hits = [child for child in children[node] if tokens[child] == emitted[-1]]
        if not hits:
            return accepted, emitted
        node = hits[0]
        accepted.append(node)
