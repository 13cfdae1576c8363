"""Which nodes a budget forces, against a loop over the text of each node by itself."""

import random

import pytest
import torch

from sequoia_vllm.verification.thinking_budgets import Markers, NodeTexts, forced_tokens

#   0 -+- 1 -+- 3 --- 6
#      |     +- 4 --- 7
#      +- 2 --- 5
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 4]
NODES = len(PARENTS)
OTHER = 9


def path_of(node: int) -> list[int]:
    """Nodes from the root down to this one."""
    return [node] if node == 0 else [*path_of(PARENTS[node]), node]


def last(text: list[int], marker: list[int]) -> int:
    places = range(len(text) - len(marker), -1, -1)
    return next((at for at in places if text[at : at + len(marker)] == marker), -1)


def expected(
    text: list[int], start: list[int], natural: list[int], end: list[int], budget: int
) -> int:
    """The token that has to follow this text; -1: none."""
    begun, ended = last(text, start), last(text, natural)
    if budget < 0 or begun <= ended or len(text) - begun - len(start) < budget:
        return -1
    fitting = (n for n in range(len(end) - 1, 0, -1) if len(text) >= n and text[-n:] == end[:n])
    return end[next(fitting, 0)]


@pytest.mark.parametrize("by_slot", [False, True], ids=["one tree", "by slot"])
@pytest.mark.parametrize(
    ("start", "natural", "end"),
    [([3], [5], [5]), ([3, 4], [7], [5, 6, 7]), ([3, 3, 4], [6, 7], [5, 5, 6, 7]),
     ([3, 3, 4], [6], [5, 6]), ([3], [6, 6, 7], [5, 6])],
)  # fmt: skip
def test_each_node_is_forced_by_its_own_text(start, natural, end, by_slot):
    rng = random.Random(len(start))
    ancestors = torch.tensor([[n in path_of(node) for n in range(NODES)] for node in range(NODES)])
    parents = torch.tensor(PARENTS, dtype=torch.int32)
    if by_slot:
        parents, ancestors = parents.repeat(4, 1), ancestors.repeat(4, 1, 1)
    seen = set()
    for _ in range(400):
        slots = rng.sample(range(4), 2)
        committed = torch.full((4, 16), OTHER)
        texts, budgets, trees = [], [], []
        for slot in slots:
            known = rng.choices(
                [*start, *start, *natural, *end, OTHER], k=rng.choice([1, 2, 6, 12])
            )
            committed[slot, : len(known)] = torch.tensor(known)
            below = rng.choices([*start, *natural, *end, *end, OTHER], k=NODES - 1)
            trees.append([known[-1], *below])
            texts.append(known)
            budgets.append(rng.choice([-1, 0, 1, 3, 6]))
        num_committed = torch.zeros(4, dtype=torch.int32)
        num_committed[slots] = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        nodes = torch.arange(NODES).repeat(2)
        depths = torch.tensor([len(path_of(node)) - 1 for node in range(NODES)]).repeat(2)
        own = torch.tensor(slots).repeat_interleave(NODES)

        def of_rows(values: list[int]) -> torch.Tensor:
            return torch.tensor(values).repeat_interleave(NODES)

        forces, tokens = forced_tokens(
            NodeTexts(
                own, nodes, torch.tensor(trees).flatten(), num_committed[own] + depths,
                committed, num_committed, parents, ancestors,
            ),
            Markers(torch.tensor(start), torch.tensor(natural), torch.tensor(end)),
            of_rows(budgets),
            of_rows([last(text, start) for text in texts]),
            of_rows([last(text, natural) for text in texts]),
        )  # fmt: skip
        found = torch.where(forces, tokens, -1).view(2, NODES).tolist()
        for row, known in enumerate(texts):
            for node in range(NODES):
                text = known + [trees[row][n] for n in path_of(node)[1:]]
                assert found[row][node] == expected(text, start, natural, end, budgets[row])
                seen.add(found[row][node])
    assert seen == {-1, *end}
