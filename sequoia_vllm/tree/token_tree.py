"""The static token tree: its topology, its stored order, its JSON form.

Node 0 is the *root*: the last committed token. Nodes 1..N are speculated, so a
tree of ``size`` nodes drafts ``size - 1`` tokens. Depth counts edges (the
root's depth is 0); the paper's (128, 10) is ``size=128, depth=9`` here.
"""

import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_input import read_json, shortened
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.limits import MOST_NODES

SCHEMA = "sequoia-vllm/token-tree/v1"
_JSON_TYPES: dict[type, str] = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number",
    float: "a number",
}  # fmt: skip
_NOTHING = "nothing (null)"


class TreeError(SequoiaError, ValueError):
    """A tree, acceptance vector or tree file that cannot be used; says which part."""


@dataclass(frozen=True)
class TokenTree:
    """An immutable tree of draft tokens, stored so that every prefix is a tree.

    Raises:
        TreeError: ``parents`` is not a tree in this order; the message names the node.
    """

    parents: tuple[int, ...]
    """Parent of each node; ``parents[0] == -1`` and ``0 <= parents[i] < i`` for the others. The
    k-th child of a node, in index order, is its k-th draft (the acceptance vector's p[k])."""

    def __post_init__(self) -> None:
        if not self.parents:
            raise TreeError("a tree needs at least its root: parents is empty")
        for node, parent in enumerate(self.parents):
            if isinstance(parent, bool) or not isinstance(parent, (int, np.integer)):
                must = "a parent is a node number"
            elif node > 0 and not 0 <= parent < node:
                must = f"a node's parent must come before it (0 to {node - 1})"
            elif node == 0 and parent != -1:
                must = f"it is the root: its parent must be -1, not {shortened(parent)}"
            else:
                continue
            raise TreeError(f"node {node} has parent {shortened(parent)}: {must}")
        object.__setattr__(self, "parents", tuple(map(int, self.parents)))

    @classmethod
    def chain(cls, num_tokens: int) -> "TokenTree":
        """A chain of ``num_tokens`` drafts: plain speculative decoding's shape."""
        return cls(tuple(range(-1, num_tokens)))

    @property
    def size(self) -> int:
        """Number of nodes, root included."""
        return len(self.parents)

    @property
    def num_speculative_tokens(self) -> int:
        """Number of drafted tokens: every node but the root."""
        return self.size - 1

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node, in edges."""
        return int(self.depths.max())

    @cached_property
    def checksum(self) -> int:
        """32 bits that tell this tree from others, the same in every process."""
        return zlib.crc32(np.asarray(self.parents, dtype="<i4").tobytes())

    @cached_property
    def parents_array(self) -> NDArray[np.int64]:
        """``parents`` as int64, shape ``[size]``."""
        return _frozen(np.asarray(self.parents, dtype=np.int64))

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """Depth of each node in edges, int64, shape ``[size]``."""
        depths = np.zeros(self.size, dtype=np.int64)
        for node in range(1, self.size):
            depths[node] = depths[self.parents[node]] + 1
        return _frozen(depths)

    @cached_property
    def depth_first(self) -> list[int]:
        """All nodes, each after its parent, with nothing between but its subtree's."""
        order, stack = [], [0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(self.children[node]))
        return order

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in draft order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def child_ranks(self) -> NDArray[np.int64]:
        """Draft order of each node among its siblings, from 0; the root's is 0."""
        ranks = np.zeros(self.size, dtype=np.int64)
        for nodes in self.children:
            ranks[list(nodes)] = np.arange(len(nodes))
        return _frozen(ranks)

    @cached_property
    def max_branch(self) -> int:
        """Most children of any node."""
        return max(len(nodes) for nodes in self.children)

    @cached_property
    def levels(self) -> tuple[NDArray[np.int64], ...]:
        """Nodes of each depth, in index order: ``depth + 1`` int64 arrays."""
        return tuple(_frozen(np.flatnonzero(self.depths == d)) for d in range(self.depth + 1))

    @cached_property
    def ancestor_mask(self) -> NDArray[np.bool_]:
        """``mask[i, j]``: node j is node i or one of its ancestors; ``[size, size]``."""
        mask = np.eye(self.size, dtype=np.bool_)
        for node in range(1, self.size):
            mask[node] |= mask[self.parents[node]]
        return _frozen(mask)

    # -- value under an acceptance vector --------------------------------------

    def values(self, acceptance: Acceptance) -> NDArray[np.float64]:
        """Probability that each node is reached and accepted (paper, Definition 3.2).

        float64, shape ``[size]``; the root's value is 1 (the bonus token). A child beyond the
        vector's end is never accepted.
        """
        values = np.ones(self.size)
        for node, parent in enumerate(self.parents[1:], start=1):
            rank, depth = int(self.child_ranks[node]), int(self.depths[parent])
            values[node] = values[parent] * acceptance.probability(rank, depth)
        return values

    def expected_tokens(self, acceptance: Acceptance) -> float:
        """Expected tokens of one step, bonus token included (Proposition 3.4)."""
        return float(self.values(acceptance).sum())

    # -- stored order ----------------------------------------------------------

    def sorted_by_value(self, acceptance: Acceptance) -> "TokenTree":
        """The same tree with its most valuable nodes first.

        A node still comes after its parent and its previous sibling, so every prefix is a tree.
        vLLM's scheduler trims drafts from the end: it leaves the best part.
        """
        import heapq

        values = self.values(acceptance)
        order: list[int] = []
        frontier: list[tuple[float, int, int]] = [(-1.0, 0, 0)]
        while frontier:
            _, _, node = heapq.heappop(frontier)
            order.append(node)
            candidates = list(self.children[node][:1])
            if node != 0:
                siblings = self.children[self.parents[node]]
                candidates += siblings[self.child_ranks[node] + 1 :][:1]
            for after in candidates:
                heapq.heappush(frontier, (-values[after], int(self.depths[after]), after))
        new_index = {node: index for index, node in enumerate(order)}
        return TokenTree((-1, *(new_index[self.parents[node]] for node in order[1:])))

    def trim(self, size: int) -> "TokenTree":
        """The tree of the first ``size`` nodes, root included.

        Raises:
            TreeError: ``size`` is below 1.
        """
        if size < 1:
            raise TreeError(f"cannot trim a tree to {size} nodes: the root always stays")
        return self if size >= self.size else TokenTree(self.parents[:size])

    # -- JSON ------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this tree, with its ``schema`` key."""
        sizes = {"size": self.size, "depth": self.depth}
        return {"schema": SCHEMA, **sizes, "parents": list(self.parents)}

    @classmethod
    def from_dict(cls, data: Any) -> "TokenTree":
        """Reads what `to_dict` wrote, or its ``parents`` alone; other keys are ignored.

        Raises:
            TreeError: The object is not a token tree of this schema, or too large for engines.
        """
        if not isinstance(data, dict):
            what = _JSON_TYPES.get(type(data), _NOTHING)
            raise TreeError(f"a tree file holds one JSON object, not {what}")
        schema = data.get("schema", SCHEMA)
        if schema != SCHEMA:
            raise TreeError(f'"schema" is {shortened(schema)}; this version reads {SCHEMA!r}')
        parents = data.get("parents")
        if not isinstance(parents, list):
            what = _JSON_TYPES.get(type(parents), _NOTHING)
            raise TreeError(f'"parents" must be a list of node numbers, not {what}')
        if (size := len(parents)) > MOST_NODES:
            most = f"engines take at most {MOST_NODES:,}, keep the first of them"
            raise TreeError(f"the tree has {size} nodes: {most}")
        tree = cls(tuple(parents))
        for key, value in (("size", tree.size), ("depth", tree.depth)):
            if (said := data.get(key, value)) != value:
                raise TreeError(f'"{key}" says {shortened(said)} but "parents" make it {value}')
        return tree

    def save(self, path: Path | str) -> None:
        """Writes the tree as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "TokenTree":
        """Reads a tree file.

        Raises:
            TreeError: The file is missing, is not JSON, or is not a tree.
        """
        data = read_json(Path(path), "tree", TreeError)
        try:
            return cls.from_dict(data)
        except TreeError as error:
            raise TreeError(f"tree file {path}: {error}") from error


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array
