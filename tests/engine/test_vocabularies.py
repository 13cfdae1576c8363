"""Drafts with another vocabulary: the target's output, and what the draft is worth."""

import pytest
import torch
from vllm import SamplingParams

from sequoia_vllm.engine.frontend import engine_config
from sequoia_vllm.engine.runner.vocabulary import TokensOf, tokens_to_draft
from tests.engine.test_sampled import CUT, PLAIN, VOCAB, check_law
from tests.support.engines import generated, metric, plain_outputs, runner_of, running, sequoia
from tests.support.models import DRAFT, TARGET, prompts, save_llama, save_word_tokenizer
from tests.support.vocabularies import (
    save_draft_of_another_tokenizer,
    save_other_draft,
    save_renumbered,
    save_words,
)

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

PROMPTS = prompts(8)
GREEDY = SamplingParams(temperature=0, max_tokens=40)
COUNTS = ("tree_steps", "tokens", "depth_counts", "offered", "accepted")


SEEDED = [SamplingParams(seed=7 + i, max_tokens=24, top_p=0.9) for i in range(4)]


def greedy_with(draft) -> tuple[list[list[int]], dict]:
    """Greedy tokens, and what was counted; seeds give the tokens of plain vLLM, too."""
    expected = plain_outputs(PROMPTS[:4], SEEDED)
    with running(sequoia(draft=draft)) as llm:
        tokens = generated(llm, PROMPTS, GREEDY)
        [stats] = llm.collective_rpc("sequoia_stats", args=(True,))
        assert generated(llm, PROMPTS[:4], SEEDED) == expected
        [seeded] = llm.collective_rpc("sequoia_stats")
    assert seeded["tokens"] > seeded["tree_steps"] > 0
    return tokens, {name: stats[name] for name in COUNTS}


@pytest.fixture(scope="module")
def with_the_same_tokens() -> tuple[list[list[int]], dict]:
    return greedy_with(DRAFT)


# Measured: 1.24, 1.96 and 2.86 tokens per step.
@pytest.mark.parametrize(("shared", "least"), [(0.3, 1.15), (0.7, 1.7), (0.99, 2.6)])
def test_greedy_tokens_are_those_of_plain_vllm(shared, least, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(engine_config.logger, "log", lambda level, *words: said.append(words))
    tokens, stats = greedy_with(save_other_draft(tmp_path / "draft", shared))
    assert tokens == plain_outputs(PROMPTS, GREEDY)
    assert stats["tokens"] / stats["tree_steps"] > least
    [[_, words]] = [words for words in said if "has another vocabulary" in str(words)]
    assert f"of the target's 4,096 ({shared:.0%})" in words


def test_greedy_tokens_with_a_draft_of_another_tokenizer(tmp_path):
    """The draft's vocabulary is a fifth of the target's, of other text: much must be spelled."""
    draft = save_draft_of_another_tokenizer(tmp_path / "draft", prompts(200)[100:], 800)
    tokens, stats = greedy_with(draft)
    assert tokens == plain_outputs(PROMPTS, GREEDY)
    assert stats["tokens"] / stats["tree_steps"] > 1.7  # 1.99 measured


def test_greedy_tokens_with_a_trimmed_output_layer(with_the_same_tokens):
    with running(sequoia(draft=DRAFT, draft_vocabulary=2048)) as llm:
        tokens = generated(llm, PROMPTS, GREEDY)
        [stats] = llm.collective_rpc("sequoia_stats")
        model = runner_of(llm).drafter.model
        states = torch.randn(3, model.config.hidden_size)
        found = model.compute_logits(states)
    kept, _ = tokens_to_draft(2048, TokensOf(TARGET, 4096))
    whole = torch.nn.functional.linear(states, model.model.embed_tokens.weight)
    assert torch.allclose(found, whole[:, sorted(kept)], atol=1e-5)
    assert tokens == plain_outputs(PROMPTS, GREEDY)
    all_tokens, per_step = with_the_same_tokens[1], stats["tokens"] / stats["tree_steps"]
    assert 1.7 < per_step < all_tokens["tokens"] / all_tokens["tree_steps"]


def test_renumbered_tokens_are_accepted_as_often_as_the_same(tmp_path, with_the_same_tokens):
    """Counts agree exactly for every depth and child: nothing of the draft is lost or confused."""
    draft = save_other_draft(tmp_path / "draft", shared=1.0)
    assert greedy_with(draft) == with_the_same_tokens


# Of the target's words w0 to w5, those that the draft has, with its own numbers.
HALF = {"w3": 0, "other": 1, "w5": 2, "more": 3, "w0": 6}
ALL_BUT_ONE = {**HALF, "w4": 4, "w1": 7}


@pytest.mark.parametrize(
    ("words", "mixed", "verification", "kept"),
    [(HALF, [*PLAIN, CUT[0]], "sequoia", None), (ALL_BUT_ONE, PLAIN, "traversal", [5, 0, 4, 1])],
)
def test_completions_follow_the_exact_law(words, mixed, verification, kept, tmp_path):
    """See `test_sampled.py`, where it says what an error would have to be to be found.

    Roots have up to four children, also where the draft can draw three. The second draft has
    five of the target's six tokens, and its output layer keeps four of them.
    """
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_llama(target, seed=3, scale=1.5, vocab_size=VOCAB, max_position_embeddings=64)
    save_word_tokenizer(target)
    save_llama(draft, seed=4, vocab_size=9, max_position_embeddings=64)
    save_words(draft, words, {})
    config = sequoia(
        size=12, depth=3, draft=draft, verification=verification, draft_vocabulary=kept
    )
    with running(config, model=target, max_model_len=64, max_num_seqs=256) as llm:
        completions = check_law(llm, target, 3, mixed)
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > completions / 3


def test_a_draft_that_ends_with_another_token_is_right_about_the_end(tmp_path):
    """It computes what the target does, which is at its end every few tokens."""
    target = save_llama(tmp_path / "target", seed=3, vocab_size=VOCAB, max_position_embeddings=64)
    words = {f"w{number}": number for number in range(2, VOCAB)}
    controls = {"begin": 0, "end": 1}
    save_words(target, words, controls)
    number_of = torch.tensor([5, 3, 0, 2, 1, 4])
    draft = save_renumbered(target, tmp_path / "draft", number_of, VOCAB)
    save_words(
        draft,
        {word: int(number_of[number]) for word, number in words.items()},
        {f"other {name}": int(number_of[number]) for name, number in controls.items()},
    )
    to_the_length = SamplingParams(
        temperature=0, max_tokens=25, logit_bias={1: 0.0}, detokenize=False, ignore_eos=True
    )
    requests = [{"prompt_token_ids": [3, *last]} for last in ([2], [4], [5, 2], [4, 4])]
    with running(sequoia(size=4, depth=3, draft=draft), model=target, max_model_len=64) as llm:
        outputs = generated(llm, requests, to_the_length)
        [stats] = llm.collective_rpc("sequoia_stats")
    assert sum(tokens.count(1) for tokens in outputs) == 7
    # After the first token of a request, every step gives four.
    assert stats["tokens"] == 4 * stats["tree_steps"] == 4 * 24
