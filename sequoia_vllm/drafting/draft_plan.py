"""How many requests are drafted together, by number of drafts: what schedule and budget allow.

The plan needs no vLLM and no device. CUDA graphs to capture and memory for drafts follow from it,
and can be looked at for any server.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from sequoia_vllm.drafting.dynamic_trees import CHILDREN_ON_GPUS, inner_width
from sequoia_vllm.hardware.graph_sizes import half_octaves, last_with
from sequoia_vllm.tree import TokenTree

# Rows in all, and requests, of captured passes that read prompts, too. Steps with a prompt wait for
# the host: a pass without a graph took 4 ms on an H100, whatever its rows.
_RAGGED_ROWS, _RAGGED_REQUESTS = (64, 128, 256, 512), (4, 16, 64, 256)
MOST_RAGGED_ROWS = _RAGGED_ROWS[-1]


class DraftPlan:
    """The batches that an engine drafts for.

    A pass of the draft has at most as many rows as a batch of the target has tokens: its compiled
    model accepts no more. In a larger batch only the first requests get trees in this step.

    Args:
        drafts_by_batch: Drafts per request of batches of 1, 2, ... requests; 0: none.
        most_rows: Most rows of a pass (vLLM's ``max_num_batched_tokens``).
        others: Other numbers of drafts that batches may change over to.
        least_rows: Rows that every request has in some pass, however small its tree.
        most_by_batch: At most so many drafts to change over to; none: as ``drafts_by_batch``.
        dynamic: Whether trees may be dynamic, which have as many rows of logits.
    """

    def __init__(
        self,
        tree: TokenTree,
        drafts_by_batch: Sequence[int],
        most_rows: int,
        others: Sequence[int] = (),
        least_rows: int = 1,
        most_by_batch: Sequence[int] = (),
        dynamic: bool = False,
    ) -> None:
        self._tree, self._inner_rows = tree, inner_rows(tree)
        self._least_rows, self._most_rows, self._dynamic = least_rows, most_rows, dynamic
        self._largest_batch = len(drafts_by_batch)
        self._most_requests: dict[int, int] = {}  # asked in every step
        self._batches: dict[int, tuple[int, int]] = {}  # the smallest and the largest
        for batch, drafts in enumerate(drafts_by_batch, start=1):
            if drafts > 0:
                smallest, _ = self._batches.get(drafts, (batch, batch))
                self._batches[drafts] = smallest, batch
        for drafts in others:
            self._batches[drafts] = 1, last_with(drafts, most_by_batch or drafts_by_batch)

    @property
    def drafts(self) -> list[int]:
        """Numbers of drafts that batches have, from the largest down."""
        return sorted(self._batches, reverse=True)

    @cached_property
    def logits_rows(self) -> int:
        """Rows of draft logits to keep, for all trees of a batch."""
        rows = (self._fitting(drafts) * self._rows_per_tree(drafts) for drafts in self.drafts)
        return max(rows, default=inner_nodes(self._tree))

    def most_requests(self, drafts: int) -> int:
        """Most requests that get trees of ``drafts`` drafts in a step, in the schedule or not."""
        if drafts not in self._most_requests:
            keepable = self.logits_rows // self._rows_per_tree(drafts)
            self._most_requests[drafts] = min(self._fitting(drafts), keepable)
        return self._most_requests[drafts]

    @property
    def widest_level(self) -> int:
        """Most nodes whose logits are computed at once, over all requests; at least 1."""
        widths = {drafts: max(self._widths(drafts)) for drafts in self.drafts}
        return max((self.most_requests(each) * width for each, width in widths.items()), default=1)

    @property
    def most_rows_read(self) -> int:
        """Most rows of the CUDA graphs that read committed tokens."""
        paths = (width * sizes[-1] for width, sizes in self.read_sizes.items())
        return max(MOST_RAGGED_ROWS, *paths)

    def rows_per_request(self, drafts: int) -> int:
        """Rows of a request in the widest pass: a level's nodes, or a path that is read."""
        return max(self._least_rows, self._trimmed(drafts).depth + 1, *self._widths(drafts))

    def graph_sizes(self, drafts: int) -> list[int]:
        """Requests of the CUDA graphs that grow trees of this number of drafts, ascending.

        Each batch with this number finds a graph for at most half as many requests more.
        """
        smallest, _ = self._batches[drafts]
        most = self.most_requests(drafts)
        return [size for size in half_octaves(most) if size >= min(smallest, most)]

    @cached_property
    def read_sizes(self) -> dict[int, list[int]]:
        """Requests of the CUDA graphs that read committed tokens, by tokens per request.

        A request reads a path of the largest tree that its batch drafts, and the root. Numbers
        of drafts whose trees are equally deep share these graphs.
        """
        sizes: dict[int, set[int]] = {}
        for drafts in self.drafts:
            width = self._trimmed(drafts).depth + 1
            sizes.setdefault(width, set()).update(self.graph_sizes(drafts))
        return {width: sorted(requests) for width, requests in sizes.items()}

    def ragged_sizes(self, max_num_reqs: int) -> list[tuple[int, int]]:
        """Requests and rows of the CUDA graphs that also read prompts, ascending by rows.

        Each request of a batch may have any part of the rows. Also batches that draft nothing use
        them, so they are for up to ``max_num_reqs`` requests.
        """
        if not self._batches:
            return []
        return [
            (requests, rows)
            for rows in sorted({min(rows, self._most_rows) for rows in _RAGGED_ROWS})
            for requests in sorted({min(n, rows, max_num_reqs) for n in _RAGGED_REQUESTS})
        ]

    def _fitting(self, drafts: int) -> int:
        _, largest = self._batches.get(drafts, (1, self._largest_batch))
        return min(largest, max(1, self._most_rows // self.rows_per_request(drafts)))

    def _rows_per_tree(self, drafts: int) -> int:
        return rows_per_tree(self._trimmed(drafts), self._inner_rows)

    def _widths(self, drafts: int) -> list[int]:
        tree = self._trimmed(drafts)
        widths = level_widths(tree)
        if self._dynamic:
            widths.append(inner_width(tree.size, tree.depth, CHILDREN_ON_GPUS))
        return widths

    def _trimmed(self, drafts: int) -> TokenTree:
        return self._tree.trim(drafts + 1)


def level_widths(tree: TokenTree) -> list[int]:
    """Nodes with children at each depth, from the root down."""
    inner = [bool(children) for children in tree.children]
    counts: list[int] = np.bincount(tree.depths[inner], minlength=1).tolist()
    return counts


def inner_nodes(tree: TokenTree) -> int:
    """Nodes with children."""
    return sum(level_widths(tree))


def inner_rows(tree: TokenTree) -> list[int]:
    """For each node, its place among the nodes with children, in stored order; leaves: -1."""
    has_children = np.array([bool(children) for children in tree.children])
    return np.where(has_children, has_children.cumsum() - 1, -1).tolist()


def rows_per_tree(prefix: TokenTree, rows: Sequence[int]) -> int:
    """Rows of draft logits that a request needs to draft a prefix of the engine's tree.

    The last row is that of the prefix's last node with children. Rows before it may belong to nodes
    that have no children in the prefix. The next request must not begin in them.

    Args:
        rows: `inner_rows` of the whole tree.
    """
    inner = (rows[node] for node, children in enumerate(prefix.children) if children)
    return max(inner, default=-1) + 1


def depths_by_drafts(tree: TokenTree) -> list[int]:
    """Depth of the tree of the first 0, 1, 2, ... drafts."""
    return [int(tree.depths[: drafts + 1].max()) for drafts in range(tree.size)]
