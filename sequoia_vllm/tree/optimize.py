"""The optimal static tree, exactly (paper, section 3.1 and appendix).

The paper's T[n, d, b] is the best value of n nodes whose root has b children and depth budget d.
Its recursion is solved here from the last child to the first:

    forest[s, b, n] = max over m of  p[s, b] * gain[next(s), m] + forest[s, b+1, n-m]
    gain[s, n]      = 1 + forest[s, 0, n-1]

``forest[s, b, n]`` is the best value of n nodes spread over children b, b+1, ... of a node in
state s. Its child b is there whenever n > 0. So children are always a run 0..k without holes,
even where p is not monotone or has zeros in it. A *state* stands for what a node's subtree may
still look like: how much depth is left and which row of p applies. All states and all b at one n
need only smaller n, so one NumPy (max, +) step does them together.

Sizes count the root; depths count edges.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.token_tree import TokenTree, TreeError

Progress = Callable[[int, int], None]

# Doubles in one temporary: 1 MiB, so that the sum and the maximum over it stay in cache.
_CHUNK = 1 << 17
# Two tables of this many doubles are the largest allowed: 4 GiB together.
_MAX_CELLS = 1 << 28


def optimize_tree(
    acceptance: Acceptance | ArrayLike,
    size: int,
    max_depth: int | None = None,
    max_branch: int | None = None,
    progress: Progress | None = None,
) -> TokenTree:
    """The tree of ``size`` nodes with the most expected tokens per step.

    It has exactly ``size`` nodes where the limits leave room for them, useless ones (value 0)
    included; else it is the largest, and best, tree that they allow.

    Args:
        acceptance: p[k] or p[d][k]; anything `Acceptance.of` takes.
        size: Nodes, root included (``num_speculative_tokens + 1``).
        max_depth: Edges from the root to the deepest node; None: no limit.
        max_branch: Children per node; None, and at most: as many as the vector has entries.
        progress: Called with (sizes done, sizes in all) now and then.

    Returns:
        The tree in value order (every prefix is a tree, the best nodes first).

    Raises:
        AcceptanceError: ``acceptance`` is no such vector.
        TreeError: A limit is no whole number of at least 1.
    """
    acceptance = Acceptance.of(acceptance)
    _check_limits(size=size, max_depth=max_depth, max_branch=max_branch)
    if max_depth is None or max_depth >= size - 1:
        # One state per row of p; the last row's children are in the same state.
        p = acceptance.table[: max(1, size), :max_branch]
        following = np.minimum(np.arange(len(p)) + 1, len(p) - 1)
    else:  # one state per level; the children of the last level are leaves
        rows = np.minimum(np.arange(max_depth), len(acceptance.table) - 1)
        p, following = acceptance.table[rows, :max_branch], np.arange(max_depth) + 1
    parents = _Solution.of(p, following, size, progress).parents(0, size)
    return TokenTree(parents).sorted_by_value(acceptance)


@dataclass(frozen=True)
class Frontier:
    """Every optimal tree up to a size and a depth, from one run of the DP."""

    acceptance: Acceptance  # the vector it is optimal for
    expected_tokens: NDArray[np.float64]
    """float64, shape ``[max_size + 1, max_depth + 1]``: ``G[n, d]`` is the best expectation of a
    tree of at most n nodes, root included, and at most d edges deep. Row 0 is 0 (no tree); ``G[n,
    0]`` is 1 (root only)."""
    _solution: "_Solution"
    _roots: list[int]  # states that a whole tree may start in, by depth from 1 on
    _made: dict[tuple[int, int], TokenTree] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        acceptance: Acceptance | ArrayLike,
        max_size: int,
        max_depth: int,
        max_branch: int | None = None,
    ) -> "Frontier":
        """Runs the DP; arguments and errors are as in `optimize_tree`."""
        acceptance = Acceptance.of(acceptance)
        _check_limits(max_size=max_size, max_depth=max_depth, max_branch=max_branch)
        # A tree of n nodes is at most n - 1 deep: deeper columns repeat the last one.
        depth = max(1, min(max_depth, max_size - 1))
        p, following, roots = _all_depths(acceptance, depth, max_branch)
        solution = _Solution.of(p, following, max_size)
        best = np.zeros((max_size + 1, max_depth + 1))
        best[1:, 0] = 1.0
        exact = solution.gain[roots, 1:].T
        # Sizes the limits leave no room for keep the value of the largest tree that fits.
        best[1:, 1 : depth + 1] = np.maximum.accumulate(exact, axis=0)
        best[:, depth + 1 :] = best[:, depth : depth + 1]
        best.setflags(write=False)
        return cls(acceptance, best, solution, roots)

    def tree(self, size: int, depth: int) -> TokenTree:
        """The tree behind ``expected_tokens[size, depth]``, in value order."""
        if depth == 0 or size == 1:
            return TokenTree((-1,))
        if (size, depth) not in self._made:
            root = self._roots[min(depth, len(self._roots)) - 1]
            parents = self._solution.parents(root, size)
            self._made[size, depth] = TokenTree(parents).sorted_by_value(self.acceptance)
        return self._made[size, depth]


def _all_depths(
    acceptance: Acceptance, max_depth: int, max_branch: int | None
) -> tuple[NDArray[np.float64], NDArray[np.int64], list[int]]:
    """States (row of p, depth left), shared between the budgets of the root; and roots.

    With one row this is one state per depth; with more rows a node's level and
    the depth left below it vary apart.
    """
    last_row = len(acceptance.table) - 1
    keys = [
        (row, left)
        for row in range(min(last_row, max_depth - 1) + 1)
        for left in range(1, max_depth - row + 1)
    ]
    index = {key: i for i, key in enumerate(keys)}
    leaf = len(keys)
    following = [index.get((min(row + 1, last_row), left - 1), leaf) for row, left in keys]
    p = acceptance.table[[row for row, _ in keys], :max_branch]
    return p, np.array(following), [index[0, left] for left in range(1, max_depth + 1)]


@dataclass(frozen=True)
class _Solution:
    """What the DP found: S states, of nodes with up to B children."""

    next: NDArray[np.int64]  # ``[S]``, the state of a node's children; S means "a leaf"
    gain: NDArray[np.float64]
    """``[S + 1, size + 1]``, best value of exactly n nodes; -inf: no room; the last row: a leaf."""
    branch: NDArray[np.float64]  # ``[S, B, size - 1]``, p[s, b] * gain[next(s), m] at index m - 1
    forest: NDArray[np.float64]
    """``[S, B + 1, size]``, see the module; n nodes at index size - 1 - n, so that the sums below
    read both tables forwards."""

    @classmethod
    def of(
        cls,
        p: NDArray[np.float64],
        following: NDArray[np.int64],
        size: int,
        progress: Progress | None = None,
    ) -> "_Solution":
        """Runs the DP; ``p`` is ``[S, B]``, the acceptance of a node's children in each state."""
        count, branches = p.shape
        if count * branches * size > _MAX_CELLS:
            raise TreeError(
                f"size {size} with {branches} branches and {count} depth levels needs more than "
                "4 GiB: give a smaller size, max_depth or max_branch"
            )
        gain = np.full((count + 1, size + 1), -np.inf)
        gain[:, 1] = 1.0
        branch = np.empty((count, branches, size - 1))
        forest = np.full((count, branches + 1, size), -np.inf)
        forest[:, :, -1] = 0.0
        for n in range(1, size):
            subtree = gain[following, n][:, None]
            with np.errstate(invalid="ignore"):  # 0 * -inf: no room, whatever p is
                branch[:, :, n - 1] = np.where(np.isneginf(subtree), -np.inf, p * subtree)
            step = max(1, _CHUNK // (branches * n))
            for start in range(0, count, step):
                chunk = slice(start, start + step)
                sums = branch[chunk, :, :n] + forest[chunk, 1:, size - n :]
                forest[chunk, :-1, size - 1 - n] = sums.max(axis=-1)
            gain[:-1, n + 1] = 1.0 + forest[:, 0, size - 1 - n]
            if progress is not None and n % 16 == 0:
                progress(n, size)
        if progress is not None:
            progress(size, size)
        return cls(following, gain, branch, forest)

    def parents(self, root: int, size: int) -> tuple[int, ...]:
        """Parents of the best tree of ``size`` nodes, or of the most that fit."""
        leaf, width = len(self.next), self.forest.shape[2]
        fitting = int(np.flatnonzero(np.isfinite(self.gain[root, : size + 1]))[-1])
        parents = [-1]
        todo = [(0, root, fitting)]
        while todo:
            node, state, nodes = todo.pop()
            left, child = nodes - 1, 0
            while left and state != leaf:
                rest = self.forest[state, child + 1, width - left : width]
                # The first maximum is the smallest subtree: ties do not depend on the platform.
                taken = int(np.argmax(self.branch[state, child, :left] + rest)) + 1
                parents.append(node)
                todo.append((len(parents) - 1, int(self.next[state]), taken))
                left -= taken
                child += 1
        return tuple(parents)


def _check_limits(**limits: int | None) -> None:
    for name, value in limits.items():
        if value is None and name in ("max_depth", "max_branch"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TreeError(f"{name} must be a whole number of at least 1, not {value!r}")
        if value < 1:
            hint = " (sizes count the root)" if name.endswith("size") else ""
            raise TreeError(f"{name} must be at least 1, not {value}{hint}")
