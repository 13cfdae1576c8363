"""Drawing and verification with the vocabularies of Llama 3 and Qwen, by Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sequoia_vllm.drafting import drafted_trees
from sequoia_vllm.kernels import target_statistics, verify
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED
from sequoia_vllm.tree import TokenTree
from tests.support.chessboard import chessboard
from tests.support.drawing import draw, greedy_reference, sampled_reference
from tests.support.verifying import expected_walk, kernel_uniforms, random_request, run

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")

SIZES = [128256, 151936]


@pytest.mark.parametrize(("few", "vocabulary"), chessboard([True, False], SIZES))
def test_trees_are_verified(few, vocabulary, monkeypatch):
    """Lanes and blocks as on a GPU; tokens that count lie in the last and middle of them."""
    monkeypatch.setattr(target_statistics, "pays_off", lambda rows, device: few)
    rng = np.random.default_rng(vocabulary)
    tree = TokenTree((-1, 0, 0, 1))
    lanes = verify.lane_constants(vocabulary, 1)["LANES"]
    requests = []
    for first in (vocabulary - 1, 70_000):
        request = random_request(rng, tree, vocabulary, seed=first)
        request.tokens = [0, first, vocabulary - 2, 99_999]
        # Most of the target is at what was drafted, and at the last token.
        request.logits[:, [*request.tokens, vocabulary - 1]] += 13.0
        request.target_temperature = 0.9
        requests.append(request)
    given = replace(requests[0], mode=GREEDY, target_tokens=[vocabulary - 1, 99_999, 5, 7])
    results = run(tree, [*requests, given])
    accepted = 0
    for request, result in zip(requests, results[:2], strict=True):
        *expected, margin = expected_walk(tree, request, kernel_uniforms(tree, request), lanes)
        assert margin > 1e-6
        assert result == tuple(expected)
        accepted += len(result[0])
    assert accepted > 0
    assert results[2] == ([1, 3], [vocabulary - 1, 99_999, 7])


@pytest.mark.parametrize(("mode", "vocabulary"), chessboard([GREEDY, SAMPLED], SIZES))
def test_children_are_drawn(mode, vocabulary, monkeypatch):
    if mode == SAMPLED:  # random numbers take the interpreter as long for small blocks
        monkeypatch.setattr(drafted_trees, "_MIN_BLOCK", 8192)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(2, vocabulary, generator=generator) * 2).bfloat16()
    logits[0, -1] = logits[1, 70_000] = 20.0
    counts, temperature, seed, position, depth = [3, 5], 0.7, 2**40 + 1, 1000, 2
    drawn = draw(
        logits, mode, counts, temperature=temperature, seeds=torch.tensor([seed]),
        positions=torch.tensor([position], dtype=torch.int32), depth=depth,
    )  # fmt: skip
    for place, (row, count) in enumerate(zip(logits, counts, strict=True)):
        expected = greedy_reference(row, count)
        if mode == SAMPLED:
            where = position + depth, 3 + place
            expected = sampled_reference(row, temperature, seed, *where, count)
        assert drawn.children(0, place) == expected
        assert expected[0] == (vocabulary - 1, 70_000)[place]
