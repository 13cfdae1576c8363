"""Dynamic trees: the likeliest paths of a draft, chosen from dictionaries."""

from collections.abc import Callable, Sequence

from torch import Tensor

Path = tuple[int, ...]
"""Tokens below the root."""


def likeliest(
    scores_after: Callable[[Path], Tensor], nodes: int, depth: int, width: int, children: int
) -> list[Path]:
    """Paths of a tree's nodes without the root, the likeliest ones first.

    Args:
        scores_after: What Q is the softmax of after a path, ``[V]``.
        nodes: Of the tree, with the root.
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
    return sorted(found, key=lambda path: -found[path])[: nodes - 1]


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """Each node's path, but the root's."""
    found: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]
