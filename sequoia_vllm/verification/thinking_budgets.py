"""Thinking budgets: which tree nodes have to end their thinking, and with which token.

A text thinks from the last of its start markers on, unless an end marker follows it. Once as many
tokens as its budget follow the start marker, the end is forced token by token. This is vLLM's rule
on Model Runner V2, but each node's text is its own path. Nothing waits for the device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Markers:
    """What begins and ends thinking, integer tokens ``[n]`` each."""

    start: Tensor
    natural_end: Tensor  # what ends it in a text
    forced_end: Tensor  # what is forced at the end of a budget


@dataclass(frozen=True)
class NodeTexts:
    """The texts that end in T rows of tree nodes; rows of a request follow one another."""

    slots: Tensor  # int64 ``[T]``: request slot of each row
    nodes: Tensor  # int64 ``[T]``: its index in the tree
    tokens: Tensor  # int ``[T]``
    lengths: Tensor  # int64 ``[T]``: tokens up to the node, its own included
    committed: Tensor  # int ``[S, L]``: tokens by slot, the root's included
    num_committed: Tensor  # int ``[S]``: number of these
    parents: Tensor  # int32 ``[N]``, or ``[S, N]`` by slot: of each node; the root's is not read
    ancestors: Tensor  # bool ``[N, N]``, or ``[S, N, N]``: which nodes each sees, itself included

    def tokens_behind(self, count: int) -> list[Tensor]:
        """The last tokens of each text, backwards from its own: int ``[T]`` each; -1: none."""
        place = self.num_committed[self.slots].long() - 1
        found, at = [self.tokens], self.nodes
        for _ in range(count - 1):
            on_path = at > 0
            place = torch.where(on_path, place, place - 1)
            at = torch.where(on_path, self._of(self.parents, at).long(), at)
            before = self.committed[self.slots, place.clamp(min=0)]
            token = torch.where(at > 0, self.tokens[self._first_rows + at], before)
            found.append(token.masked_fill(place < 0, -1))
        return found

    def last_on_path(self, values: Tensor) -> Tensor:
        """The largest of these, integers ``[T]``, at the nodes of each node's path; -1: none."""
        sees = self._of(self.ancestors, self.nodes)
        rows = self._first_rows[:, None] + torch.arange(sees.shape[1], device=sees.device)
        return values[rows.clamp(max=len(values) - 1)].masked_fill(~sees, -1).amax(dim=1)

    @cached_property
    def _first_rows(self) -> Tensor:
        return torch.arange(len(self.slots), device=self.slots.device) - self.nodes

    def _of(self, table: Tensor, nodes: Tensor) -> Tensor:
        return table[self.slots, nodes] if self.parents.ndim == 2 else table[nodes]


def forced_tokens(
    texts: NodeTexts, markers: Markers, budgets: Tensor, last_start: Tensor, last_end: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens that have to come next.

    Args:
        budgets: int64 ``[T]``: of each row's request; -1: none.
        last_start, last_end: int ``[T]``: where the last start and natural end begin among the
            committed tokens; -1: there is none.

    Returns:
        Whether a row's next token is forced, bool ``[T]``, and which one it is, int64 ``[T]``.
    """
    start, natural_end, end = markers.start, markers.natural_end, markers.forced_end
    behind = texts.tokens_behind(max(len(start), len(natural_end), len(end) - 1))
    starts, ends = (
        texts.last_on_path(torch.where(_end_in(behind, each), texts.lengths - len(each), -1))
        for each in (start, natural_end)
    )
    starts, ends = torch.maximum(starts, last_start), torch.maximum(ends, last_end)
    thinks = (budgets >= 0) & (starts >= 0) & (starts > ends)
    said = torch.zeros_like(texts.slots)  # tokens of the forced end that are there already
    for count in range(1, len(end)):
        said = torch.where(_end_in(behind, end[:count]), count, said)
    return thinks & (texts.lengths - starts - len(start) >= budgets), end[said].long()


def _end_in(behind: list[Tensor], marker: Tensor) -> Tensor:
    """Whether each text ends in these tokens, bool ``[T]``."""
    found: Any = True
    for token, expected in zip(behind, marker.flip(0), strict=False):
        found = found & (token == expected)
    return found
