"""One layer of sparse attention (DeepSeek V3.2's) in float64, as the model defines it."""

from dataclasses import dataclass

import torch
from torch import Tensor

HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH = 2, 6, 3, 5


@dataclass(frozen=True)
class Tokens:
    """What a layer makes of n tokens, each at its position.

    Attributes:
        queries: ``[n, HEADS, WIDTH]``.
        latents: ``[n, WIDTH]``: key and value of all heads.
        index_queries: ``[n, INDEX_HEADS, INDEX_WIDTH]``.
        index_keys: ``[n, INDEX_WIDTH]``.
        index_weights: ``[n, INDEX_HEADS]``.
    """

    queries: Tensor
    latents: Tensor
    index_queries: Tensor
    index_keys: Tensor
    index_weights: Tensor

    @classmethod
    def random(cls, n: int) -> "Tokens":
        index = (INDEX_HEADS, INDEX_WIDTH), (INDEX_WIDTH,), (INDEX_HEADS,)
        shapes = (HEADS, WIDTH), (WIDTH,), *index
        return cls(*(torch.randn(n, *shape, dtype=torch.float64) for shape in shapes))

    def of(self, rows: list[int] | slice) -> "Tokens":
        return Tokens(*(each[rows] for each in vars(self).values()))

    def then(self, more: "Tokens") -> "Tokens":
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return Tokens(*(torch.cat(pair) for pair in pairs))


def index_scores(tokens: Tokens, row: int, index_keys: Tensor) -> Tensor:
    """``[m]``: how well the indexer of a row likes each of m keys."""
    products = torch.einsum("hd,md->hm", tokens.index_queries[row], index_keys)
    return (tokens.index_weights[row][:, None] * products.clamp(min=0)).sum(0)


def attend(query: Tensor, latents: Tensor) -> Tensor:
    """``[HEADS, WIDTH]``: attention of a row to latents ``[m, WIDTH]``."""
    weights = (query @ latents.T / WIDTH**0.5).softmax(dim=-1)
    return weights @ latents


def plainly_decoded(tokens: Tokens, most: int) -> Tensor:
    """``[HEADS, WIDTH]``: output of the last token, which attends to the ``most`` best of all."""
    last = len(tokens.latents) - 1
    scores = index_scores(tokens, last, tokens.index_keys)
    chosen = scores.topk(min(most, last + 1)).indices
    return attend(tokens.queries[last], tokens.latents[chosen])
