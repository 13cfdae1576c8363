"""P and Q at the nodes of trees, by torch alone: a model that reads a text and then trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sequoia_vllm.tree.token_tree import TokenTree

Draw = Callable[[Tensor, int], Tensor]
"""``(Q [texts, vocabulary], k) -> int64 [texts, k]``: children, in order."""


class TreeReader:
    """A model in float32 that reads several texts, and then a tree of one shape after each.

    Args:
        folder: The model's.
        matching: How a draft's tokens belong to the target's; None: by their numbers.
        rows: Of the target's logits.
    """

    def __init__(self, folder: str, matching: Any = None, rows: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self._matching, self._rows = matching, rows
        self._cache: Any = None
        self._text = torch.zeros(0)  # where a row of the cache has a token, bool [texts, length]
        self._nodes: list[int] = []  # of the tree, in the order in which they were read

    @torch.no_grad()
    def read(self, texts: Sequence[Tensor]) -> None:
        """Reads texts but for their last tokens, which are the roots of their trees."""
        from transformers import DynamicCache

        length = max(map(len, texts)) - 1
        tokens = torch.stack([pad(text[:-1], (length - len(text) + 1, 0)) for text in texts])
        self._text = (
            torch.arange(length) >= torch.tensor([length - len(t) + 1 for t in texts])[:, None]
        )
        self._cache, self._nodes = DynamicCache(config=self.model.config), []
        self.model(
            self._own(tokens),
            attention_mask=self._text.long(),
            position_ids=(self._text.cumsum(1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
        )

    @torch.no_grad()
    def logits(self, tree: TokenTree, tokens: Tensor, nodes: Sequence[int]) -> Tensor:
        """Logits at some nodes, whose ancestors were read before or are among them.

        Args:
            tree: Its shape.
            tokens: Of all of its nodes, int64 ``[texts, nodes]``.
            nodes: Which to read.

        Returns:
            Float32 ``[texts, len(nodes), target's vocabulary]``.
        """
        self._nodes += nodes
        own = torch.from_numpy(tree.ancestor_mask[np.ix_(nodes, self._nodes)])
        size = (len(tokens), len(nodes), -1)
        seen = torch.cat((self._text[:, None].expand(size), own.expand(size)), 2)
        depths = torch.from_numpy(tree.depths[list(nodes)])
        found = self.model(
            self._own(tokens[:, nodes]),
            attention_mask=seen[:, None],
            position_ids=self._text.sum(1, keepdim=True) + depths,
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        if self._matching is None:
            return found[..., : self._rows]
        drawn = torch.from_numpy(self._matching.drawn)
        known = drawn >= 0
        mapped = found.new_full((*found.shape[:2], len(drawn)), -torch.inf)
        mapped[..., known] = found[..., drawn[known]]
        return mapped

    def forget_tree(self) -> None:
        """Goes back to the end of the texts."""
        if self._nodes:
            self._cache.crop(-len(self._nodes))
        self._nodes = []

    def _own(self, tokens: Tensor) -> Tensor:
        if self._matching is None or self._matching.read is None:
            return tokens
        return torch.from_numpy(self._matching.read)[tokens]


def drafted(
    draft: TreeReader, tree: TokenTree, roots: Tensor, temperature: float, draw: Draw
) -> tuple[Tensor, Tensor]:
    """Drafts a tree level by level after each text.

    Returns:
        Tokens ``[texts, nodes]``, and Q at each node, ``[texts, nodes, vocabulary]``; zero at
        leaves.
    """
    tokens = roots[:, None].repeat(1, tree.size)
    laws: Tensor | None = None
    for level in tree.levels:
        inner = [int(node) for node in level if tree.children[node]]
        if not inner:
            continue
        found = (draft.logits(tree, tokens, inner) / temperature).softmax(-1)
        if laws is None:
            laws = found.new_zeros(len(tokens), tree.size, found.shape[-1])
        laws[:, inner] = found
        for row, node in enumerate(inner):
            children = list(tree.children[node])
            tokens[:, children] = draw(found[:, row], len(children))
    draft.forget_tree()
    assert laws is not None
    return tokens, laws


def likeliest(law: Tensor, k: int) -> Tensor:
    """The k likeliest tokens."""
    return law.topk(k).indices


def likeliest_and_one_drawn(law: Tensor, k: int) -> Tensor:
    """The k - 1 likeliest tokens, and one that is drawn from the others."""
    fixed = law.topk(k - 1).indices
    return torch.cat((fixed, law.scatter(1, fixed, 0.0).multinomial(1)), 1)
