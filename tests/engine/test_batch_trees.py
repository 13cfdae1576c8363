"""Edits of logits along the paths of a batch's trees on V1, against plain loops."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import LogitsProcessors

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.v1.path_edits import edited_by_paths
from sequoia_vllm.step.grow import Draft, GrownTrees
from sequoia_vllm.step.score import lay_out
from sequoia_vllm.tree import TokenTree
from tests.support.histories import Histories, penalised, with_bad_words

VOCABULARY = 12
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3))
SIZES = [7, 4, 1, 7]  # the third request has no tree
CPU = torch.device("cpu")


def batch_of(found: Histories):
    lengths = [(len(p), len(p) + len(o)) for p, o in zip(found.prompts, found.outputs, strict=True)]
    tokens = np.full((len(lengths), 40), -9, dtype=np.int32)
    for request, (start, end) in enumerate(lengths):
        tokens[request, :start], tokens[request, start:end] = (
            found.prompts[request],
            found.outputs[request],
        )
    starts, ends = np.array(lengths).T
    return SimpleNamespace(token_ids_cpu=tokens, num_prompt_tokens=starts, num_tokens_no_spec=ends)


def trees_of(found: Histories):
    names = [str(request) for request in range(len(SIZES))]
    tokens = torch.zeros(len(SIZES), TREE.size, dtype=torch.int64)
    rows = zip(found.requests, found.nodes, found.token_ids, strict=True)
    for request, node, token in rows:
        tokens[request, node] = token
    grown = GrownTrees(tokens, torch.zeros(0, VOCABULARY), torch.full_like(tokens, -1))
    scheduled = {name: tokens[index, 1 : SIZES[index]].tolist() for index, name in enumerate(names)}
    return lay_out(
        TreeTables(TREE, CPU),
        scheduled,
        {name: Draft(grown, index) for index, name in enumerate(names)},
        {name: index for index, name in enumerate(names)},
        lambda name: False,
        np.cumsum(SIZES),
        np.array(SIZES) + 20,
    )


def edited(logits, found, params):
    padded = [[*prompt, VOCABULARY] for prompt in found.prompts]
    allowed = torch.zeros(len(params), VOCABULARY, dtype=torch.bool)
    for index, one in enumerate(params):
        if one.allowed_token_ids:
            allowed[index] = True
            allowed[index, one.allowed_token_ids] = False
    metadata = SimpleNamespace(
        logitsprocs=LogitsProcessors(),
        no_penalties=False,
        prompt_token_ids=torch.tensor(padded),
        presence_penalties=torch.tensor([one.presence_penalty for one in params]),
        frequency_penalties=torch.tensor([one.frequency_penalty for one in params]),
        repetition_penalties=torch.tensor([one.repetition_penalty for one in params]),
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={
            index: one.bad_words_token_ids
            for index, one in enumerate(params)
            if one.bad_words_token_ids
        },
    )
    return edited_by_paths(logits, trees_of(found), metadata, params, batch_of(found))


def of_trees(found: Histories) -> torch.Tensor:
    return torch.tensor([request != 2 for request in found.requests])


@pytest.mark.parametrize("seed", range(5))
def test_penalties_and_bad_words_are_by_path(seed):
    found = Histories.random(TREE, SIZES, VOCABULARY, seed)
    rng = np.random.default_rng(seed)
    repetition, frequency, presence = [1.3, 1.0, 1.5, 1.0], [0.5, 0.0, 0.0, -0.4], [0.0, 0.7, 0, 0]
    words = [[rng.integers(0, 4, rng.integers(1, 6)).tolist() for _ in range(9)] for _ in SIZES]
    params = [
        SamplingParams(
            repetition_penalty=repetition[index], frequency_penalty=frequency[index],
            presence_penalty=presence[index], _bad_words_token_ids=words[index],
        )
        for index in range(len(SIZES))
    ]  # fmt: skip
    logits = torch.randn(len(found.nodes), VOCABULARY)
    before = logits.clone()
    expected = penalised(
        with_bad_words(logits, found, words), found, repetition, frequency, presence
    )
    result = edited(logits, found, params)
    own = of_trees(found)
    torch.testing.assert_close(result[own], expected[own], rtol=1e-6, atol=1e-6)
    assert torch.equal(result[~own], logits[~own])  # vLLM's sampler does those
    assert torch.equal(logits, before)
    assert result[own].isinf().any()


def test_min_tokens_are_counted_along_the_path():
    found = Histories.random(TREE, SIZES, VOCABULARY, seed=0)
    params = [SamplingParams() for _ in SIZES]
    least = len(found.outputs[0]) + 2
    params[0] = SamplingParams(min_tokens=least, stop_token_ids=[3, 5])
    logits = torch.zeros(len(found.nodes), VOCABULARY)
    result = edited(logits, found, params)
    for row, request in enumerate(found.requests):
        short = request == 0 and len(found.generated(row)) < least
        assert result[row].isinf().nonzero().squeeze(1).tolist() == ([3, 5] if short else [])


def test_a_grammar_that_has_ended_may_end_before_the_least_tokens():
    found = Histories.random(TREE, SIZES, VOCABULARY, seed=0)
    params = [SamplingParams() for _ in SIZES]
    regex = StructuredOutputsParams(regex="a")
    params[0] = SamplingParams(
        min_tokens=99, max_tokens=200, stop_token_ids=[3, 5], structured_outputs=regex
    )
    logits = torch.zeros(len(found.nodes), VOCABULARY)
    logits[1] = -torch.inf  # a grammar's mask: only 3 is left
    logits[1, 3] = 2.0
    result = edited(logits, found, params)
    assert torch.equal(result[1], logits[1])
    assert result[0].isinf().nonzero().squeeze(1).tolist() == [3, 5]


def test_bias_and_allowed_tokens():
    found = Histories.random(TREE, SIZES, VOCABULARY, seed=0)
    params = [SamplingParams() for _ in SIZES]
    params[1] = SamplingParams(logit_bias={2: 1.5, 7: -3.0}, allowed_token_ids=[2, 4, 7])
    result = edited(torch.zeros(len(found.nodes), VOCABULARY), found, params)
    expected = torch.full((VOCABULARY,), -torch.inf)
    expected[[2, 4, 7]] = torch.tensor([1.5, 0.0, -3.0])
    for row, request in enumerate(found.requests):
        assert torch.equal(result[row], expected if request == 1 else torch.zeros(VOCABULARY))


def test_logits_that_nothing_edits_are_not_copied():
    found = Histories.random(TREE, SIZES, VOCABULARY, seed=0)
    logits = torch.randn(len(found.nodes), VOCABULARY, dtype=torch.bfloat16)
    only_without_tree = [SamplingParams() for _ in SIZES]
    only_without_tree[2] = SamplingParams(presence_penalty=1.0)
    assert edited(logits, found, only_without_tree) is logits
