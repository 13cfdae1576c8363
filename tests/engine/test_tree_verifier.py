"""Verification reads each tree's own rows of the step's logits, and the tokens that were scored."""

import numpy as np
import pytest
import torch

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.v1.batch_trees import Draft, DraftedTreesV1, schedule_trees
from sequoia_vllm.engine.v1.verifier import TargetDistribution, TreeVerifierV1
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.sampling import Truncation

TREE = TokenTree((-1, 0, 0, 1))
VERIFIER = TreeVerifierV1(lambda logits: logits.argmax(dim=-1), None)


def verified(
    scheduled: dict[str, list[int]], request_index: dict[str, int], rows: list[int],
    grammars: str = "", temperature: float | None = None,
):  # fmt: skip
    """What is emitted where row i of the logits says token ``rows[i]``; drafted were 1, 2 and 3."""
    tokens = torch.tensor([[0, 1, 2, 3]]).expand(len(scheduled), -1)
    probs = torch.full((2, 9), 1 / 9)
    grown = DraftedTreesV1(tokens, probs, torch.tensor([[0, 1, -1, -1]]).expand_as(tokens))
    lengths = np.ones(len(request_index), dtype=np.int64)
    for request, drafts in scheduled.items():
        lengths[request_index[request]] = len(drafts) + 1
    trees = schedule_trees(
        TreeTables(TREE, torch.device("cpu")),
        scheduled,
        {request: Draft(grown, row) for row, request in enumerate(scheduled)},
        request_index,
        grammars.__contains__,
        lengths.cumsum(),
        lengths + 10,
    )
    logits = torch.nn.functional.one_hot(torch.tensor(rows), 9).log()
    temperatures = None if temperature is None else torch.full((len(lengths),), temperature)
    result = VERIFIER.verify(trees, TargetDistribution(logits, temperatures, Truncation()), {})
    return result.output_tokens.tolist()


def test_whole_batch_of_whole_trees():
    found = verified({"a": [1, 2, 3], "b": [1, 2, 3]}, {"a": 0, "b": 1}, [1, 3, 8, 7, 2, 8, 6, 8])
    assert found == [[1, 3, 7], [2, 6, -1]]


def test_rows_of_others_are_not_taken_for_padding():
    """A trimmed tree and a request without one: as many rows as two whole trees have."""
    index = {"a": 0, "plain": 1, "b": 2}
    found = verified({"a": [1, 2], "b": [1, 2, 3]}, index, [1, 7, 8, 5, 1, 3, 8, 6])
    assert found == [[1, 7, -1], [1, 3, 6]]


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_replaced_drafts_are_accepted_where_a_grammar_may_have_replaced_them(temperature):
    index = {"a": 0, "b": 1, "plain": 2}
    replaced = {"a": [5, 2, 3], "b": [5, 2, 6], "plain": [5, 2, 3]}
    rows = [5, 3, 8, 7, 5, 6, 8, 4, 5, 3, 8, 7]
    found = verified(replaced, index, rows, grammars="ab", temperature=temperature)
    assert [[token for token in row if token >= 0] for row in found] == [[5, 3, 7], [5, 6, 4], [5]]
