"""Slow, obvious references for trees, and strategies that make them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from sequoia_vllm.hardware.budget import Ranges, drafts_by_batch
from sequoia_vllm.tree import Acceptance, TokenTree

DATA = Path(__file__).parents[1] / "data"


def drafts_at(ranges: Ranges, batch_size: int) -> int:
    """Drafts of each request at a batch size, as vLLM reads a schedule."""
    most = max(drafts for _, _, drafts in ranges)
    return drafts_by_batch(ranges, most, batch_size)[-1]


@cache
def published() -> dict[str, Any]:
    return json.loads((DATA / "published_trees.json").read_text())


@cache
def all_trees(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Parents, child ranks and depths of every ordered tree of this size: ``[trees, size]``.

    Node i hangs off the last node or one of its ancestors, as their next child,
    which makes each ordered tree once (Catalan(size - 1) of them).
    """
    trees = [([-1], [0], [0])]
    for node in range(1, size):
        grown = []
        for parents, ranks, depths in trees:
            parent = node - 1
            while parent != -1:
                rank = sum(1 for other in parents if other == parent)
                grown.append(([*parents, parent], [*ranks, rank], [*depths, depths[parent] + 1]))
                parent = parents[parent]
        trees = grown
    return tuple(np.array([tree[part] for tree in trees]) for part in range(3))


def brute_force(
    acceptance: Acceptance, size: int, max_depth: int | None, max_branch: int | None
) -> float:
    """Most expected tokens of any tree of at most ``size`` nodes."""
    best = 1.0
    places = range(size + 1)
    padded = np.array([[acceptance.probability(n, depth) for n in places] for depth in places])
    for nodes in range(2, size + 1):
        parents, ranks, depths = all_trees(nodes)
        allowed = np.ones(len(parents), dtype=bool)
        if max_depth is not None:
            allowed &= depths.max(axis=1) <= max_depth
        if max_branch is not None:
            allowed &= ranks.max(axis=1) < max_branch
        values = np.ones(parents.shape)
        rows = np.arange(len(parents))
        for node in range(1, nodes):
            parent = parents[:, node]
            values[:, node] = values[rows, parent] * padded[depths[rows, parent], ranks[:, node]]
        if allowed.any():
            best = max(best, float(values[allowed].sum(axis=1).max()))
    return best


@st.composite
def trees(draw: st.DrawFn, max_size: int = 24) -> TokenTree:
    size = draw(st.integers(1, max_size))
    return TokenTree((-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))))


@st.composite
def rows(draw: st.DrawFn, branches: int) -> list[float]:
    """One row of p: sums to at most 1, monotone or not, zeros not rare."""
    weight = st.one_of(st.just(0.0), st.floats(0.001, 1.0))
    weights = draw(st.lists(weight, min_size=branches, max_size=branches))
    scale = draw(st.floats(0.05, 1.0)) / max(sum(weights), 1.0)
    return [weight * scale for weight in weights]


@st.composite
def acceptances(draw: st.DrawFn, max_rows: int = 1, max_branches: int = 5) -> Acceptance:
    branches = draw(st.integers(1, max_branches))
    count = draw(st.integers(1, max_rows))
    return Acceptance.of([draw(rows(branches)) for _ in range(count)])
