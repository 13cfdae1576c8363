"""Greedy output is plain vLLM's, token for token (float32), whatever the engine does.

`test_differential.py` has preemption, prompts in chunks, requests that end within a path and
prefixes from the cache; `test_cache_contents.py` has what that cache holds of accepted tokens.
"""

import math
from collections import Counter
from itertools import chain

import pytest
from vllm import LLM, SamplingParams

from sequoia_vllm.engine.runner import tensor_parallel
from sequoia_vllm.engine.v1 import proposer
from sequoia_vllm.engine.v1.proposer import TreeProposerV1
from tests.support.engines import (
    chain_of,
    generated,
    metric,
    noting,
    plain_outputs,
    runner_of,
    running,
    sequoia,
    tokens_of,
)
from tests.support.generating import served
from tests.support.models import DRAFT, TARGET, prompts, save_spoilt_pair
from tests.support.reference_models import accepted_by_depth

pytestmark = pytest.mark.engine

PROMPTS = prompts(24)
GREEDY = SamplingParams(temperature=0, max_tokens=96)
UNSEEN = 4000  # a token that answers lack


def plain(count: int) -> list[list[int]]:
    """Plain vLLM's greedy tokens for the first prompts, of one engine for all tests."""
    return plain_outputs(PROMPTS[:16], GREEDY)[:count]


def test_same_tokens_in_batches():
    found, counts = served(sequoia(), PROMPTS[:16], GREEDY)
    assert found == plain(16)
    assert counts["accepted_tokens"] / counts["drafts"] > 1  # the trees do something: 1.7 measured


def test_every_tree_is_the_reference_steps():
    """The draft's tokens, their order, what is accepted: not the emitted tokens alone."""
    with running(sequoia(), max_num_seqs=1) as llm:
        [answer] = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        tree, counts = runner_of(llm).tree, runner_of(llm).stats.counts
    expected = accepted_by_depth([answer.prompt_token_ids], tree.parents, counts.trees)
    assert counts.depth_counts.tolist() == expected
    assert counts.trees > 10
    assert tokens_of([answer]) == plain(1)


def test_chains_beside_prompts():
    config = chain_of(DRAFT, 4)
    found, counts = served(config, PROMPTS[:8], GREEDY, max_num_batched_tokens=64)
    assert found == plain(8)
    assert counts["accepted_tokens"] / counts["drafts"] > 1


@pytest.mark.parametrize(("value", "config"), [
    (math.nan, sequoia()), (math.inf, sequoia(dynamic_tree=True)), (math.nan, chain_of("", 3)),
])  # fmt: skip
def test_a_rejected_token_that_the_target_reads_as_nan(tmp_path, value, config):
    """Trees and chains draft it all the time, and plain decoding never emits it."""
    frequent, *_ = Counter(chain.from_iterable(plain(8))).most_common(1)[0]
    target, draft = save_spoilt_pair(tmp_path, UNSEEN, frequent, value)
    noted = noting(  # dynamic trees come with their shapes
        proposer, "take_from_rank0", lambda trees: (trees if trees.ndim == 2 else trees[0]).clone()
    )
    with running({**config, "model": draft}, model=target) as llm, noted as drafted:
        answers = llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)
        assert any(UNSEEN in tokens for tokens in drafted)
        caches = [runner_of(llm)._kv_caches[name] for name in runner_of(llm)._target_layers]
        assert all(cache.isfinite().all() for cache in caches)
    assert UNSEEN not in chain(*plain(8), *(answer.prompt_token_ids for answer in answers))
    assert tokens_of(answers) == plain(8)


def test_a_target_of_nan_ends_as_plain(tmp_path, monkeypatch):
    """A prompt has the token: all rows behind it are NaN, and no other request's."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    target, draft = save_spoilt_pair(tmp_path, UNSEEN, UNSEEN, math.nan)
    texts = [*PROMPTS[:2], {"prompt_token_ids": [5, UNSEEN, 9]}]
    expected = plain_outputs(texts, GREEDY, model=target)
    with running(sequoia(draft=draft), model=target) as llm:
        assert generated(llm, texts, GREEDY) == expected
        assert metric(llm, "vllm:corrupted_requests") == 1
    assert set(expected[2]) == {0}
    assert expected[:2] == plain(2)


def test_a_prompt_cached_while_the_draft_rested_is_drafted_as_well_as_any():
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
            found = generated(llm, batch, params)
            assert found == [expected[texts.index(text)] for text in batch]
            counted += llm.collective_rpc("sequoia_stats", args=(True,))
            hits.append(metric(llm, "vllm:prefix_cache_hits"))
    unknown, rested, cached = ([stats["tree_steps"], stats["tokens"]] for stats in counted)
    assert rested == [0, 0]
    assert hits[2] - hits[1] >= 64
    assert cached == unknown == [8, 32]  # after the first token, four with every tree


def test_same_tokens_up_to_max_model_len():
    """Requests run into the model's length with less room than a tree needs."""
    to_the_end = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = plain_outputs(PROMPTS[:8], to_the_end, max_model_len=192)
    assert served(sequoia(), PROMPTS[:8], to_the_end, max_model_len=192)[0] == expected


def test_same_tokens_with_a_star():
    """`test_draft_slots.py` has a tree of 64 nodes."""
    assert served(sequoia(9, 1), PROMPTS[:6], GREEDY)[0] == plain(6)


def test_schedule_by_batch_size_from_none_to_full():
    """The batch shrinks, as requests end, past both thresholds; the draft catches up first."""
    params = [SamplingParams(temperature=0, max_tokens=16 + 12 * i) for i in range(8)]
    schedule = [[1, 2, 15], [3, 5, 4], [6, 8, 0]]
    config = sequoia(num_speculative_tokens_per_batch_size=schedule)
    found, counts = served(config, PROMPTS[:8], params)
    assert found == plain_outputs(PROMPTS[:8], params)
    # At least 8 requests x 16 tokens were decoded before the first drafts.
    assert 0 < counts["tokens"] < sum(p.max_tokens for p in params) - 8 * 16
    assert counts["tokens_per_tree"] > 1.5  # a draft that missed tokens gets 1.1


def test_draft_shorter_than_target():
    """Past the draft's length requests go on without drafts."""
    found, counts = served(sequoia(max_model_len=160), PROMPTS[:6], GREEDY)
    assert found == plain(6)
    assert 0 < counts["tokens"] < 6 * 60  # about 32 of the 128 tokens per request had drafts


@pytest.mark.parametrize("fails_in", ["advance", "grow"])
def test_a_draft_that_fails_ends_speculation_only(monkeypatch, fails_in):
    """In the middle of 8 requests, trees of the step before still to be verified."""
    expected, said, calls = plain(8), [], []
    original = getattr(TreeProposerV1, fails_in)

    def failing(self, *args, **kwargs):
        calls.append(fails_in)
        if len(calls) == 12:
            raise RuntimeError("the draft's file is gone")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TreeProposerV1, fails_in, failing)
    monkeypatch.setattr(tensor_parallel.logger, "exception", lambda *words: said.append(words))
    with running(sequoia()) as llm:
        assert generated(llm, PROMPTS[:8], GREEDY) == expected
        assert 0 < metric(llm, "sequoia:trees") < 12 * 8
        assert metric(llm, "sequoia:draft_failures") == 1
        assert len(calls) == 12
    [(message, error)] = said
    assert message.startswith(
        "Sequoia: the draft model failed (%s), and this engine drafts no more"
    )
    assert error == 'RuntimeError("the draft\'s file is gone")'


def test_no_drafts_count_where_the_schedule_has_none():
    """Requests come while others decode, 1, 2, 3, and end: a step of three verifies nothing.

    But the first: its trees were grown for a batch of two.
    """
    schedule = [[1, 2, 15], [3, 8, 0]]
    lengths, comes = (60, 40, 12), {0: 0, 5: 1, 10: 2}
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    seen: list[tuple[int, float]] = []  # requests in a step, and trees that it verified
    with running(sequoia(num_speculative_tokens_per_batch_size=schedule)) as llm:
        engine, tokens = llm.llm_engine, {}
        while len(tokens) < 3:
            if (number := comes.pop(len(seen), None)) is not None:
                engine.add_request(str(number), PROMPTS[number], params[number])
            count, before = engine.get_num_unfinished_requests(), drafts_of(llm)
            for output in engine.step():
                if output.finished:
                    tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            seen.append((count, drafts_of(llm) - before))
    assert [tokens[number] for number in range(3)] == plain_outputs(PROMPTS[:3], params)
    drafts = {count: [n for c, n in seen if c == count] for count in (1, 2, 3)}
    first, *rest = drafts[3]
    assert first == 2
    assert len(rest) >= 10
    assert not any(rest)
    assert max(drafts[1]) == 1
    assert max(drafts[2]) == 2
    shrunk = max(step for step, (count, _) in enumerate(seen) if count == 3)
    assert any(n for _, n in seen[shrunk + 1 :])  # again when one has ended


def drafts_of(llm: LLM) -> float:
    """Trees that vLLM counted as drafts."""
    return metric(llm, "vllm:spec_decode_num_drafts")
