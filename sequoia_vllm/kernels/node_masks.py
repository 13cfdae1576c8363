"""Which nodes of a tree see which, as tree attention takes it: packed, 32 nodes in a word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sequoia_vllm.attention.tree_attention import within_window

WORD_BITS = 32


def pack_ancestors(ancestors: Tensor) -> Tensor:
    """Packs a tree's ancestor matrix for `tree_attention`.

    ``ancestors[i, j]``, bool ``[N, N]``, says that node i sees node j (itself or an ancestor), so
    j <= i. Returns int32 ``[N, ceil(N / 32)]`` on its device: node j is bit j % 32 of word j // 32.

    Raises:
        ValueError: The matrix is not square, or a node would see a later one, which need not be in
            the cache yet.
    """
    if ancestors.ndim != 2 or ancestors.shape[0] != ancestors.shape[1]:
        raise ValueError(f"expected a square matrix, got {list(ancestors.shape)}")
    if ancestors.triu(1).any():
        raise ValueError("a node cannot see a later node")
    return pack_nodes(ancestors)


def pack_nodes(seen: Tensor) -> Tensor:
    """Words int32 ``[..., n]`` of nodes bool ``[..., N]``; waits for nothing on the device."""
    bits = functional.pad(seen.long(), (0, -seen.shape[-1] % WORD_BITS))
    weights = 1 << torch.arange(WORD_BITS, device=seen.device)
    packed = (bits.unflatten(-1, (-1, WORD_BITS)) * weights).sum(dim=-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack_ancestors(words: Tensor) -> Tensor:
    """The ancestor matrices bool ``[..., N, 32 * n]`` of words int32 ``[..., N, n]``."""
    bits = torch.arange(WORD_BITS, device=words.device)
    return (words[..., None] >> bits & 1).bool().flatten(-2)


@dataclass(frozen=True)
class NodeMask:
    """The mask of a tree: which nodes see which. `tree_attention` takes it."""

    words: Tensor
    """int32 ``[N, ceil(N / 32)]``, from `pack_ancestors`; or ``[S, ...]`` by request slot."""
    depths: Tensor  # int32 ``[N]``: of each node below its root; or ``[S, N]``
    window: int | None = None
    """The window that the words are for: positions that a node sees, its own included; None:
    all."""
    ahead: int = 0  # nodes later than itself that a node may see at most: 0 in a tree

    @classmethod
    def of(cls, ancestors: Tensor, window: int | None = None) -> NodeMask:
        """Mask of a bool ``[N, N]`` for `pack_ancestors`, or of a block, whose nodes all see all.

        Or the masks of ``[S, N, N]``.

        Raises:
            ValueError: See `pack_ancestors`.
        """
        if ancestors.ndim == 3:
            masks = [cls.of(tree, window) for tree in ancestors]
            words = torch.stack([mask.words for mask in masks])
            return cls(words, torch.stack([mask.depths for mask in masks]), window)
        nodes = len(ancestors)
        depths, within = within_window(ancestors, window or nodes)
        depths = depths.to(torch.int32)
        if nodes > 1 and ancestors.all():
            return cls(pack_nodes(within), depths, window, ahead=nodes - 1)
        return cls(pack_ancestors(within), depths, window)


def seen_nodes(queries: Any) -> Tensor:
    """Which of their tree's nodes `NodeQueries` see: their ancestors, or bool ``[R, I, I]``."""
    if queries.mask is None:
        return queries.ancestors
    return unpack_ancestors(queries.mask.words[queries.request_slots.clamp(min=0)])


class NodeMasks:
    """The masks of the few matrices and windows that an engine has, each made once."""

    def __init__(self) -> None:
        # By identity; the matrix is kept alive, so that no other one gets its id.
        self._made: dict[tuple[int, int | None], tuple[Tensor, NodeMask]] = {}

    def of(self, ancestors: Tensor, window: int | None = None) -> NodeMask:
        """Mask of a bool ``[N, N]``, or ``[S, N, N]`` by request slot, that does not change."""
        key = id(ancestors), window
        if key not in self._made:
            self._made[key] = ancestors, NodeMask.of(ancestors, window)
        return self._made[key][1]
