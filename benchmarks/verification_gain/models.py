"""P and Q at the nodes of trees, by torch alone: a model that reads a text and then trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.tree.token_tree import TokenTree
from sequoia_vllm.verification.sampling import draft_distribution, draw_without_replacement

Draw = Callable[[Tensor, int], Tensor]
"""``(logits [rows, vocabulary], k) -> int64 [rows, k]``: children of each row, in order."""


class TreeReader:
    """A model in float32, its logits over the target's tokens.

    Args:
        folder: The model's.
        matching: How a draft's tokens belong to the target's; None: by their numbers.
        rows: Of the target's logits.
    """

    def __init__(self, folder: str, matching: Any = None, rows: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self._read = self._drawn = None
        if matching is not None:
            self._drawn = torch.from_numpy(matching.drawn)
            self._read = None if matching.read is None else torch.from_numpy(matching.read)
        self._rows = rows
        self._cache: Any = None
        self._length = 0

    @torch.no_grad()
    def read(self, text: Tensor) -> None:
        """Reads a text ``[length]`` but for its last token, which is the root of its trees."""
        from transformers import DynamicCache

        self._cache, self._length = DynamicCache(config=self.model.config), len(text) - 1
        self.model(self._own(text[None, :-1]), past_key_values=self._cache, use_cache=True)

    @torch.no_grad()
    def logits(self, tree: TokenTree, tokens: Tensor, count: int) -> Tensor:
        """Logits at the first nodes of a tree, float32 ``[count, vocabulary]``.

        Args:
            tree: Its shape; parents come before their children.
            tokens: Of its nodes, the root's first, int64 ``[nodes]``.
            count: Nodes whose tokens are known.
        """
        own = torch.from_numpy(tree.ancestor_mask[:count, :count].copy())
        seen = torch.cat((own.new_ones(count, self._length), own), 1)
        found = self.model(
            self._own(tokens[None, :count]),
            attention_mask=seen[None, None],
            position_ids=self._length + torch.from_numpy(tree.depths[:count].copy())[None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[0]
        self._cache.crop(-count)
        if self._drawn is None:
            return found[:, : self._rows]
        known = self._drawn >= 0
        mapped = found.new_full((count, len(known)), -torch.inf)
        mapped[:, known] = found[:, self._drawn[known]]
        return mapped

    def _own(self, tokens: Tensor) -> Tensor:
        return tokens if self._read is None else self._read[tokens]


def drafted(
    draft: TreeReader, tree: TokenTree, root: int, temperature: float, draw: Draw
) -> tuple[NDArray[np.int64], Tensor]:
    """Drafts a tree level by level.

    Returns:
        Its tokens ``[nodes]``, and Q at each node, ``[nodes, vocabulary]``; zero at leaves.
    """
    tokens = torch.full((tree.size,), root)
    laws: Tensor | None = None
    for level in tree.levels:
        inner = [int(node) for node in level if tree.children[node]]
        if not inner:
            continue
        logits = draft.logits(tree, tokens, int(level[-1]) + 1)[inner] / temperature
        if laws is None:
            laws = logits.new_zeros(tree.size, logits.shape[1])
        laws[inner] = logits.softmax(-1)
        drawn = draw(logits, max(len(tree.children[node]) for node in inner))
        for row, node in enumerate(inner):
            children = list(tree.children[node])
            tokens[children] = _children(draw, logits[row], drawn[row], len(children))
    assert laws is not None
    return tokens.numpy(), laws


def _children(draw: Draw, logits: Tensor, drawn: Tensor, count: int) -> Tensor:
    """A node's children: the first of those drawn, but for laws that depend on their number."""
    return draw(logits[None], count)[0] if draw is likeliest_and_one_drawn else drawn[:count]


def without_replacement(logits: Tensor, k: int) -> Tensor:
    """As this package drafts above temperature 0."""
    return draw_without_replacement(draft_distribution(logits, logits.new_ones(len(logits))), k)


def likeliest(logits: Tensor, k: int) -> Tensor:
    """The k likeliest tokens."""
    return logits.topk(k).indices


def likeliest_and_one_drawn(logits: Tensor, k: int) -> Tensor:
    """The k - 1 likeliest tokens, and one that is drawn from the others."""
    fixed = logits.topk(k - 1).indices
    others = logits.scatter(1, fixed, -torch.inf).softmax(-1)
    return torch.cat((fixed, others.multinomial(1)), 1)
