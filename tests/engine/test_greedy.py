"""Greedy output is plain vLLM's, token for token (float32), whatever the engine does.

`test_differential.py` has preemption, prompts in chunks and requests that end within a path.
"""

import pytest
from vllm import SamplingParams

from sequoia_vllm.engine.runner import draft_failure
from sequoia_vllm.engine.v1.batch_trees import ScoringTreesV1
from sequoia_vllm.engine.v1.proposer import TreeProposerV1
from tests.support.engines import metric, runner_of, running, sequoia, tokens_of
from tests.support.models import TARGET, prompts
from tests.support.reference_models import accepted_by_depth

pytestmark = pytest.mark.engine

PROMPTS = prompts(24)
GREEDY = SamplingParams(temperature=0, max_tokens=96)


@pytest.mark.parametrize("batch", [1, 8])
def test_same_tokens_at_any_batch_size(batch, plain_outputs):
    expected = plain_outputs(PROMPTS[:16], GREEDY)[: 2 * batch]
    with running(sequoia(), max_num_seqs=batch) as llm:
        found = tokens_of(llm.generate(PROMPTS[: 2 * batch], GREEDY, use_tqdm=False))
        accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
        drafts = metric(llm, "vllm:spec_decode_num_drafts")
    assert found == expected
    assert accepted / drafts > 1  # the trees do something: 1.7 measured


def test_every_tree_is_the_reference_steps():
    """The draft's tokens, their order, what is accepted: not the emitted tokens alone."""
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with running(sequoia(), max_num_seqs=1) as llm:
        [answer] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        tree, counts = runner_of(llm).tree, runner_of(llm).stats.counts
    expected = accepted_by_depth([answer.prompt_token_ids], tree.parents, counts.trees)
    assert counts.depth_counts.tolist() == expected
    assert counts.trees > 10


@pytest.mark.parametrize("drafts", [4, 5])
def test_chains_are_scored_by_vllms_own_attention(drafts, plain_outputs, monkeypatch):
    """The tree is one of four, and a second child of the root at its end."""
    branching = []
    queries = ScoringTreesV1.queries
    monkeypatch.setattr(
        ScoringTreesV1, "queries", lambda *args: branching.append(True) or queries(*args)
    )
    expected = plain_outputs(PROMPTS[:16], GREEDY)[:8]
    schedule = [[1, 8, drafts]]
    tree = {"parents": [-1, 0, 1, 2, 3, 0]}
    config = sequoia(tree=tree, num_speculative_tokens_per_batch_size=schedule)
    with running(config, max_num_batched_tokens=64) as llm:
        found = tokens_of(llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False))
        accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
        drafted = metric(llm, "vllm:spec_decode_num_drafts")
    assert found == expected
    assert accepted / drafted > 1
    assert bool(branching) == (drafts == 5)


def test_same_tokens_with_prefix_caching(plain_outputs):
    """A second pass over the same prompts reads blocks that trees were committed to."""
    long = [first + second for first, second in zip(PROMPTS[:4], PROMPTS[8:12], strict=True)]
    expected = plain_outputs(long, GREEDY)
    with running(sequoia(), block_size=32, enable_prefix_caching=True) as llm:
        first = llm.generate(long, GREEDY, use_tqdm=False)
        # The continuation's prompt covers what was generated under trees.
        continued = [
            text + output.outputs[0].text for text, output in zip(long, first, strict=True)
        ]
        second = llm.generate(continued, GREEDY, use_tqdm=False)
        hits = metric(llm, "vllm:prefix_cache_hits")
    assert tokens_of(first) == expected
    assert tokens_of(second) == plain_outputs(continued, GREEDY)
    assert hits > 4 * 224  # every second prompt hit the blocks of its first


def test_a_prompt_cached_while_the_draft_rested_is_drafted_as_well_as_any(plain_outputs):
    """The draft is the target itself: the first child of every node is right, if it has read all.

    Four requests with one prompt run without drafts, and leave it in the prefix cache.
    """
    texts = [PROMPTS[0] + PROMPTS[1] + PROMPTS[2], PROMPTS[3] + PROMPTS[4] + PROMPTS[5]]
    params = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
    expected = plain_outputs(texts, params)
    schedule = [[1, 1, 7], [2, 8, 0]]
    config = sequoia(8, 3, TARGET, num_speculative_tokens_per_batch_size=schedule)
    counted, hits = [], []
    with running(config, block_size=32, enable_prefix_caching=True) as llm:
        for batch in ([texts[0]], [texts[1]] * 4, [texts[1]]):
            found = tokens_of(llm.generate(batch, params, use_tqdm=False))
            assert found == [expected[texts.index(text)] for text in batch]
            counted += llm.collective_rpc("sequoia_stats", args=(True,))
            hits.append(metric(llm, "vllm:prefix_cache_hits"))
    unknown, rested, cached = ([stats["tree_steps"], stats["tokens"]] for stats in counted)
    assert rested == [0, 0]
    assert hits[2] - hits[1] >= 64
    assert cached == unknown == [8, 32]  # after the first token, four with every tree


def test_same_tokens_up_to_max_model_len(plain_outputs):
    """Requests run into the model's length with less room than a tree needs."""
    to_the_end = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = plain_outputs(PROMPTS[:8], to_the_end, max_model_len=192)
    with running(sequoia(), max_model_len=192) as llm:
        found = tokens_of(llm.generate(PROMPTS[:8], to_the_end, use_tqdm=False))
    assert found == expected


@pytest.mark.parametrize("tree", [{"size": 9, "depth": 1}, {"size": 64, "depth": 8}])
def test_same_tokens_with_other_shapes(tree, plain_outputs):
    expected = plain_outputs(PROMPTS[:6], GREEDY)
    with running(sequoia() | {"tree": tree}) as llm:
        found = tokens_of(llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False))
    assert found == expected


def test_schedule_by_batch_size_from_none_to_full(plain_outputs):
    """The batch shrinks, as requests end, past both thresholds; the draft catches up first."""
    params = [SamplingParams(temperature=0, max_tokens=16 + 12 * i) for i in range(8)]
    expected = plain_outputs(PROMPTS[:8], params)
    schedule = [[1, 2, 15], [3, 5, 4], [6, 8, 0]]
    with running(sequoia(num_speculative_tokens_per_batch_size=schedule)) as llm:
        found = tokens_of(llm.generate(PROMPTS[:8], params, use_tqdm=False))
        [stats] = llm.collective_rpc("sequoia_stats")
    assert found == expected
    # At least 8 requests x 16 tokens were decoded before the first drafts.
    assert 0 < stats["tokens"] < sum(p.max_tokens for p in params) - 8 * 16
    assert stats["tokens"] > 1.5 * stats["tree_steps"]  # a draft that missed tokens gets 1.1


def test_draft_shorter_than_target(plain_outputs):
    """Past the draft's length requests go on without drafts."""
    expected = plain_outputs(PROMPTS[:6], GREEDY)
    with running(sequoia(max_model_len=160)) as llm:
        found = tokens_of(llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False))
        [stats] = llm.collective_rpc("sequoia_stats")
    assert found == expected
    assert 0 < stats["tokens"] < 6 * 60  # about 32 of the 128 tokens per request had drafts


@pytest.mark.parametrize("fails_in", ["advance", "grow"])
def test_a_draft_that_fails_ends_speculation_only(plain_outputs, monkeypatch, fails_in):
    """In the middle of 8 requests, trees of the step before still to be verified."""
    expected = plain_outputs(prompts(8), GREEDY)
    said, calls = [], []
    original = getattr(TreeProposerV1, fails_in)

    def failing(self, *args, **kwargs):
        calls.append(fails_in)
        if len(calls) == 12:
            raise RuntimeError("the draft's file is gone")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TreeProposerV1, fails_in, failing)
    monkeypatch.setattr(draft_failure.logger, "exception", lambda *words: said.append(words))
    with running(sequoia()) as llm:
        assert tokens_of(llm.generate(prompts(8), GREEDY, use_tqdm=False)) == expected
        assert 0 < metric(llm, "sequoia:trees") < 12 * 8
        assert metric(llm, "sequoia:draft_failures") == 1
        assert len(calls) == 12
    [(message, error)] = said
    assert message.startswith(
        "Sequoia: the draft model failed (%s), and this engine drafts no more"
    )
    assert error == 'RuntimeError("the draft\'s file is gone")'
