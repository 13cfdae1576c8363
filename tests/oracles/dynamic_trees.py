"""Dynamic trees: the likeliest paths of a draft, chosen from dictionaries."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

Path = tuple[int, ...]
"""Tokens below the root."""


def likeliest(
    scores_after: Callable[[Path], Tensor], nodes: int, depth: int, width: int, children: int
) -> list[Path]:
    """Paths of a tree's nodes without the root, the likeliest ones first.

    Args:
        nodes: Of the tree, with the root.
        others: As of `candidates`.
    """
    found = candidates(scores_after, depth, width, children)
    return sorted(found, key=lambda path: -found[path])[: nodes - 1]


def candidates(
    scores_after: Callable[[Path], Tensor], depth: int, width: int, children: int
) -> dict[Path, float]:
    """Paths that a draft predicts, upper levels first, with the logarithms of their shares.

    Args:
        scores_after: What Q is the softmax of after a path, ``[V]``.
        depth: Levels below the root.
        width: Nodes of each level whose children may be nodes.
        children: Tokens of each that may.
    """
    level: dict[Path, float] = {(): 0.0}
    found: dict[Path, float] = {}
    for _ in range(depth):
        below = {}
        for path, value in level.items():
            scores = scores_after(path)
            shares = (scores.double() - scores.double().logsumexp(0)).tolist()
            best = sorted(range(len(shares)), key=lambda token: -shares[token])[:children]
            below |= {(*path, token): value + shares[token] for token in best}
        found |= below
        level = dict(sorted(below.items(), key=lambda item: -item[1])[:width])
    return found


def with_told(found: dict[Path, float], told: Path, share: float) -> dict[Path, float]:
    """Candidates, and behind those that go along a told text the rest of it, at ``share`` each."""
    length = max(n for n in range(len(told) + 1) if n == 0 or told[:n] in found)
    first = found[told[:length]] if length else 0.0
    added = range(length + 1, len(told) + 1)
    return found | {told[:n]: first + (n - length) * math.log(share) for n in added}


def shared(
    every: Sequence[dict[Path, float]], nodes: int, most: Sequence[int], deepest: Sequence[int]
) -> list[dict[Path, int]]:
    """For each request its paths, the likeliest first, with their places in the batch's order:
    1 for the first of each request and for no other, 2 for as many next ones, up to ``nodes`` - 1.

    Args:
        every: Each request's candidates.
        nodes: Of a tree in the mean, with the root.
        most, deepest: Each request's nodes below the root at most, and its levels.
    """
    firsts, others = [], []
    for row, found in enumerate(every):
        own = sorted((p for p in found if len(p) <= deepest[row]), key=lambda path: -found[path])
        chosen = [(found[path], row, path) for path in own[: most[row]]]
        firsts += chosen[:1]
        others += chosen[1:]
    order = firsts + sorted(others, key=lambda one: -one[0])
    result: list[dict[Path, int]] = [{} for _ in every]
    for rank, (_, row, path) in enumerate(order[: (nodes - 1) * len(every)]):
        result[row][path] = 1 + rank // len(every)
    return result


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """Each node's path, but the root's."""
    found: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]
