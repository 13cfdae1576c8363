"""Penalties and bad words at tree nodes in plain Python: a list of tokens for every node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sequoia_vllm.tree import TokenTree


@dataclass(frozen=True)
class Histories:
    """Requests in a batch, and the nodes of their trees, request after request.

    Attributes:
        prompts, outputs: Tokens of each request; the last of its outputs is its root.
        requests: Of each row.
        nodes: Likewise, in stored order.
        token_ids: What the target reads in each row.
        paths: Tokens below the root, down to the node itself, of each row.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    requests: list[int]
    nodes: list[int]
    token_ids: list[int]
    paths: list[list[int]]

    @classmethod
    def random(
        cls, tree: TokenTree | list[TokenTree], sizes: list[int], vocabulary: int, seed: int
    ) -> Histories:
        """So many nodes of one tree, or of each request's own; tokens repeat often."""
        rng = np.random.default_rng(seed)
        most = min(vocabulary, 9)
        found = cls([], [], [], [], [], [])
        trees = tree if isinstance(tree, list) else [tree] * len(sizes)
        for request, (own, size) in enumerate(zip(trees, sizes, strict=True)):
            found.prompts.append(rng.integers(0, most, 6).tolist())
            found.outputs.append(rng.integers(0, most, rng.integers(1, 8)).tolist())
            tokens = [found.outputs[-1][-1], *rng.integers(0, most, size - 1).tolist()]
            paths: list[list[int]] = [[]]
            for node in range(1, size):
                paths.append([*paths[own.parents[node]], tokens[node]])
            found.requests.extend([request] * size)
            found.nodes.extend(range(size))
            found.token_ids.extend(tokens)
            found.paths.extend(paths)
        return found

    def generated(self, row: int) -> list[int]:
        """What this node's history has after the prompt."""
        return self.outputs[self.requests[row]] + self.paths[row]


def penalised(
    logits: Tensor,
    histories: Histories,
    repetition: list[float],
    frequency: list[float],
    presence: list[float],
) -> Tensor:
    """A copy of the logits ``[rows, V]`` with penalties, given by request."""
    found = logits.clone()
    for row, request in enumerate(histories.requests):
        counts = Counter(histories.generated(row))
        for token in counts.keys() | set(histories.prompts[request]):
            value = float(found[row, token])
            penalty = repetition[request]
            found[row, token] = value / penalty if value > 0 else value * penalty
        for token, count in counts.items():
            found[row, token] -= frequency[request] * count + presence[request]
    return found


def with_bad_words(logits: Tensor, histories: Histories, words: list[list[list[int]]]) -> Tensor:
    """A copy of the logits ``[rows, V]`` without the last tokens of words that are begun."""
    found = logits.clone()
    for row, request in enumerate(histories.requests):
        generated = histories.generated(row)
        for *before, last in words[request]:
            begun = len(generated) >= len(before)
            if begun and generated[len(generated) - len(before) :] == before:
                found[row, last] = -torch.inf
    return found
