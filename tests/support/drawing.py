"""Calls `DraftedTrees.draw` for one level of a tree, with buffers of known contents around it.

And what it should draw.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.tree_tables import Level
from tests.oracles.random_numbers import exponential, race_scores

UNTOUCHED = -99
DRAW = 0  # the purpose of the random numbers
TINY = torch.finfo(torch.float32).tiny


@dataclass
class Drawn:
    """What `DraftedTrees.draw` wrote.

    Attributes:
        tokens: ``[R, 1 + all children + 1]``: the first and last column are no child's.
        draft_logits, draft_stats: As given to it.
        around: What lies in memory before and after these two.
        counts: Children of each node.
    """

    tokens: Tensor
    draft_logits: Tensor
    draft_stats: Tensor
    around: Tensor
    counts: list[int]

    def children(self, request, place):
        """The children of one node, in draft order."""
        first = 1 + sum(self.counts[:place])
        return self.tokens[request, first : first + self.counts[place]].tolist()


def draw(
    logits, modes, counts, *, temperature=1.0, top_k=2**31 - 1, top_p=1.0, min_p=0.0, seeds=None,
    positions=None, depth=2, nodes=None, state_rows=None, inner_rows=None, num_states=None,
    tokens_dtype=torch.int64, workspaces=None, max_children=None, told=None,
    node_tokens=(),
):  # fmt: skip
    """Draws ``counts[j]`` children of node j of every request.

    ``modes`` and the sampling parameters may be one for all; unless given, seeds and
    positions are 0, 1, 2, ..., nodes and inner rows 3, 4, ... and 0, 1, ..., and no text says what
    comes next.
    """
    width = len(counts)
    requests = len(logits) // width
    every = torch.arange(requests)
    state_rows = every if state_rows is None else torch.as_tensor(state_rows)
    num_states = requests + 1 if num_states is None else num_states
    max_children = max_children or max(counts)
    columns = torch.zeros(width, max_children, dtype=torch.int32)
    place = 1
    for row, count in zip(columns, counts, strict=True):
        row[:count] = torch.arange(place, place + count)
        place += count
    inner_rows = torch.arange(width) if inner_rows is None else torch.as_tensor(inner_rows)
    kept = torch.full(
        (num_states + 2, width + 1, logits.shape[1] + 3), UNTOUCHED, dtype=logits.dtype
    )
    kept_stats = torch.full((num_states + 2, width + 1, 2), float(UNTOUCHED))
    drawn = Drawn(
        tokens=torch.full((requests, place + 1), UNTOUCHED, dtype=tokens_dtype),
        draft_logits=kept[1:-1],
        draft_stats=kept_stats[1:-1],
        around=torch.empty(0),
        counts=counts,
    )
    for node, token in enumerate(node_tokens):
        drawn.tokens[:, node] = token
    batch = SimpleNamespace(
        temperature=torch.zeros(requests) + temperature,
        top_k=torch.zeros(requests, dtype=torch.int32) + torch.as_tensor(top_k, dtype=torch.int32),
        top_p=torch.zeros(requests) + top_p,
        min_p=torch.zeros(requests) + min_p,
        seeds=every if seeds is None else seeds,
        modes=torch.zeros(requests, dtype=torch.int32) + torch.as_tensor(modes, dtype=torch.int32),
        roots=every.int() if positions is None else positions,
        slots=every,
        told=torch.zeros(requests, 0, dtype=torch.int64) if told is None else told,
        multiples=lambda step: state_rows.int(),
    )
    level = Level(
        depth=depth,
        first=0,
        nodes=torch.arange(3, 3 + width, dtype=torch.int32) if nodes is None else nodes,
        parents=None,
        counts=torch.tensor(counts, dtype=torch.int32),
        columns=columns,
        rows=inner_rows.int(),
    )
    trees = DraftedTrees(
        None,
        None,
        drawn.draft_logits,
        drawn.draft_stats,
        drawn.tokens,
        [] if workspaces is None else workspaces,
    )
    trees.draw(batch, requests, SimpleNamespace(rows_per_tree=1), level, logits)
    outside = [kept[0], kept[-1], kept_stats[0], kept_stats[-1]]
    drawn.around = torch.cat([rows.float().flatten() for rows in outside])
    return drawn


def draft_distribution(logits, temperature):
    """Q ``[V]`` of one row, float32 as the kernels define it."""
    probability = torch.softmax(logits.float() / temperature, dim=0)
    return torch.where(probability >= TINY, probability, 0.0)


def sampled_reference(logits, temperature, seed, position, node, count):
    """The race in float64: tokens in order of arrival."""
    draft = draft_distribution(logits, temperature).double().numpy()
    arrivals = exponential(seed, np.arange(len(draft)), position, node, DRAW)
    return np.argsort(-race_scores(draft, arrivals), kind="stable")[:count].tolist()


def greedy_reference(logits, count):
    """The largest logits, of equal ones the first."""
    return logits.float().sort(descending=True, stable=True).indices[:count].tolist()
