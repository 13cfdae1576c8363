"""Q of heads that correct a block by the tokens drafted in it, by hand."""

from functools import partial

import pytest
import torch

pytest.importorskip("vllm")
from sequoia_vllm.drafters.dflash.v2 import candidate_logits
from sequoia_vllm.drafters.dspark.v2 import markov_logits

NONE = float("-inf")


class Bias:
    """Bias of token t: t, 2 * t, 3 * t, ... for the tokens that may be drafted."""

    def markov_embed(self, tokens):
        return tokens[:, None].float()

    def markov_bias(self, embedded):
        return embedded * torch.arange(1, 4)


def test_a_bias_by_the_nodes_token():
    base = torch.tensor([[[0.0, 10.0, 20.0], [1.0, 2.0, 3.0]]])  # one request, two levels
    logits = partial(markov_logits, base, Bias(), None, 3)
    assert logits(0, torch.tensor([[2]])).tolist() == [[2, 14, 26]]
    assert logits(1, torch.tensor([[0, 5]])).tolist() == [[1, 2, 3], [6, 12, 18]]


def test_a_bias_over_a_part_of_the_vocabulary_or_more_than_it():
    base = torch.zeros(1, 1, 3)
    part = partial(markov_logits, base, Bias(), torch.tensor([0, 2, 4]), 5)
    assert part(0, torch.tensor([[1]])).tolist() == [[1, NONE, 2, NONE, 3]]
    padded = partial(markov_logits, base, Bias(), None, 2)
    assert padded(0, torch.tensor([[1]])).tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_after_the_nodes_token(dtype):
    candidates = torch.tensor([[[3, 1], [4, 0]], [[2, 0], [1, 2]]])  # two requests, two levels
    scores = torch.arange(16.0).view(2, 2, 2, 2)
    logits = partial(candidate_logits, candidates, scores.to(dtype), 5)
    roots = logits(0, torch.tensor([[4], [4]]))
    assert roots.dtype == dtype
    assert roots.tolist() == [[NONE, 1, NONE, 0, NONE], [9, NONE, 8, NONE, NONE]]
    # After the first candidate, the second, and one that was none.
    below = logits(1, torch.tensor([[3, 1, 0], [2, 0, 4]]))
    assert below.tolist() == [
        [5, NONE, NONE, NONE, 4], [7, NONE, NONE, NONE, 6], [5, NONE, NONE, NONE, 4],
        [NONE, 12, 13, NONE, NONE], [NONE, 14, 15, NONE, NONE], [NONE, 12, 13, NONE, NONE],
    ]  # fmt: skip
