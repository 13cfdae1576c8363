"""UniVer's verification (arXiv 2605.04543), for one tree at a time, in float64.

Written from formulas that a public implementation states; that it is lossless is tested.
It composes an optimal transport plan at each node, which is scaled by the probability that the
path until there is accepted. Nodes are then decided in post order, the children before their
parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.tree.token_tree import TokenTree

Floats = NDArray[np.float64]
_TINY = 1e-300


@dataclass(frozen=True)
class Decision:
    """How a tree's verification may end.

    Attributes:
        accepted: Probability that each node is the last that is accepted, ``[nodes]``.
        laws: Weights of the token that follows each node then, ``[nodes, vocabulary]``.
    """

    accepted: Floats
    laws: Floats


def univer(tree: TokenTree, tokens: NDArray[np.int64], target: Floats, draft: Floats) -> Decision:
    """Decides about a tree in which each node's last child was drawn.

    Args:
        tree: Its shape.
        tokens: Of its nodes, ``[nodes]``; the root's is not read.
        target: P at each node, ``[nodes, vocabulary]``.
        draft: Q likewise.
    """
    # Mean probability, over what may be drawn below a node, that it or a node below is accepted.
    arrived = np.zeros(tree.size)
    arrived[0] = 1
    stays = arrived.copy()  # that it is accepted itself, once all of its children are rejected
    laws = np.array(target, dtype=np.float64)
    for node, children in enumerate(tree.children):
        if not children:
            stays[node] = arrived[node]
            continue
        fixed, drawn = list(tokens[list(children[:-1])]), int(tokens[children[-1]])
        rest = drawn_law(draft[node], fixed)
        wanted = arrived[node] * target[node]
        taken = min(1.0, wanted[drawn] / max(rest[drawn], _TINY))
        left = np.maximum(wanted - rest, 0)
        total = max(1 - arrived[node] + left.sum(), _TINY)
        shares = [left[token] * (1 - taken) / total for token in fixed] + [taken]
        before = 0.0
        for child, share in zip(children, shares, strict=True):
            arrived[child] = min(1.0, share / max(1 - before, _TINY))
            before += share
        none = (1 - taken) * (1 - arrived[node]) / total
        stays[node] = 1 - none / max(1 - before, _TINY)
        left[fixed] = 0
        laws[node] = left
    return Decision(_ends(tree, stays.clip(0, 1)), laws)


def drawn_law(draft: Floats, fixed: list[int]) -> Floats:
    """The law of a node's last child: Q without the tokens of the others."""
    rest = np.array(draft, dtype=np.float64)
    rest[fixed] = 0
    return rest / max(rest.sum(), _TINY)


def _ends(tree: TokenTree, stays: Floats) -> Floats:
    """Probability of each node to be the last that is accepted, given the tree.

    Args:
        tree: Its shape.
        stays: Probability that a node is accepted once all of its children are rejected.
    """
    rejected = 1 - stays  # the node and all below it, when verification comes to them
    for node in reversed(range(1, tree.size)):
        rejected[tree.parents[node]] *= rejected[node]
    reached = np.ones(tree.size)
    accepted = np.zeros(tree.size)
    for node, children in enumerate(tree.children):
        left = reached[node]
        for child in children:
            reached[child] = left
            left *= rejected[child]
        accepted[node] = left * stays[node]
    return accepted
