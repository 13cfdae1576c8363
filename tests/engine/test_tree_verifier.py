"""Greedy verification reads each tree's own rows of the step's logits."""

import numpy as np
import torch

from sequoia_vllm.engine.v1.drafts import Draft, DraftedTrees, schedule_trees
from sequoia_vllm.engine.v1.target_distribution import TargetDistribution
from sequoia_vllm.engine.v1.verifier import TreeVerifier
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification import Truncation

TREE = TokenTree((-1, 0, 0, 1))
VERIFIER = TreeVerifier(lambda logits: logits.argmax(dim=-1), None)


def verified(scheduled: dict[str, list[int]], request_index: dict[str, int], rows: list[int]):
    """What greedy verification accepts where row i of the logits says token ``rows[i]``."""
    tokens = torch.tensor([[0, 1, 2, 3]]).expand(len(scheduled), -1)
    grown = DraftedTrees(tokens, torch.empty(0), torch.empty(0))
    lengths = np.ones(len(request_index), dtype=np.int64)
    for request, drafts in scheduled.items():
        lengths[request_index[request]] = len(drafts) + 1
    trees = schedule_trees(
        TREE,
        scheduled,
        {request: Draft(grown, row) for row, request in enumerate(scheduled)},
        request_index,
        lengths.cumsum(),
        lengths + 10,
        torch.device("cpu"),
    )
    logits = torch.nn.functional.one_hot(torch.tensor(rows), 9).float()
    result = VERIFIER.verify(trees, TargetDistribution(logits, None, Truncation()), {})
    return result.output_tokens.tolist()


def test_whole_batch_of_whole_trees():
    found = verified({"a": [1, 2, 3], "b": [1, 2, 3]}, {"a": 0, "b": 1}, [1, 3, 8, 7, 2, 8, 6, 8])
    assert found == [[1, 3, 7], [2, 6, -1]]


def test_rows_of_others_are_not_taken_for_padding():
    """A trimmed tree and a request without one: as many rows as two whole trees have."""
    index = {"a": 0, "plain": 1, "b": 2}
    found = verified({"a": [1, 2], "b": [1, 2, 3]}, index, [1, 7, 8, 5, 1, 3, 8, 6])
    assert found == [[1, 7, -1], [1, 3, 6]]
