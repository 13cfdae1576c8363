"""Requests longer than the draft model are served, without drafts beyond its length."""

import logging

import pytest
from vllm.config import VllmConfig

from sequoia_vllm.engine import hooks
from sequoia_vllm.engine.core import scheduling
from sequoia_vllm.engine.v1.proposer import TreeProposerV1
from tests.support.engines import (
    configured,
    generated,
    metric,
    noting,
    plain_outputs,
    running,
    sequoia,
    undrafted,
)
from tests.support.generating import greedy_and_seeded
from tests.support.models import save_llama

SHORT = 64
VOCAB = 512


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target of 512 positions, and a draft that knows 64 of them."""
    path = tmp_path_factory.mktemp("lengths")
    keys = {"vocab_size": VOCAB, "eos_token_id": None}
    target = save_llama(path / "target", seed=1, scale=2.0, **keys)
    draft = save_llama(path / "draft", seed=1, scale=2.0, max_position_embeddings=SHORT, **keys)
    return str(target), str(draft)


@pytest.mark.engine
def test_requests_beyond_the_drafts_length_are_those_of_plain_vllm(pair, caplog, monkeypatch):
    """Prompts that end before it, at it and behind it, and completions across it."""
    monkeypatch.setattr(scheduling, "logger", logging.getLogger("trees"))
    target, draft = pair
    lengths = [20, SHORT - 8, SHORT - 1, SHORT, SHORT + 1, 2 * SHORT]
    prompts = [
        {"prompt_token_ids": [(7 * length + 13 * place) % VOCAB for place in range(length)]}
        for length in lengths
    ]
    params = greedy_and_seeded(len(lengths), 64)
    options = {"model": target, "skip_tokenizer_init": True}
    expected = plain_outputs(prompts, params, **options)

    def largest(proposer, tokens, positions, *_) -> int:
        return int(positions.max())

    with (
        noting(TreeProposerV1, "_forward", largest) as draft_positions,
        running(sequoia(size=8, depth=3, draft=draft), **options) as llm,
    ):
        assert llm.llm_engine.vllm_config.model_config.max_model_len == 512
        found = generated(llm, prompts, params)
        trees = metric(llm, "vllm:spec_decode_num_drafts")
        accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
        # Four prompts, of which the draft can follow none with a token more and its child.
        assert undrafted(llm) == {"longer_than_draft": 4}
    [line] = [message for message in caplog.messages if "has no drafts" in message]
    assert f"a prompt of {SHORT - 1} tokens" in line
    assert f"{draft} reads requests of up to {SHORT} tokens" in line
    assert found == expected
    assert 0 < trees < 120  # only as far as the draft reaches: 44 + 8 + 1 tokens at most
    assert accepted > trees
    assert SHORT - 2 <= max(draft_positions) < SHORT  # its RoPE table has no more


def test_the_engine_keeps_its_length(pair, monkeypatch):
    """Imitates vLLM 0.33, which has a check that cuts it."""
    target, draft = pair
    cut = []

    def limit(vllm_config):
        cut.append(vllm_config)
        vllm_config.model_config.max_model_len = SHORT

    def length(**options) -> int:
        config = configured(model=target, skip_tokenizer_init=True, max_model_len=512, **options)
        config._limit_max_model_len_to_draft()  # as engine cores do
        return config.model_config.max_model_len

    monkeypatch.setattr(VllmConfig, "_limit_max_model_len_to_draft", limit, raising=False)
    hooks.install()
    post_init = VllmConfig.__post_init__

    def limiting(vllm_config):
        vllm_config._limit_max_model_len_to_draft()
        post_init(vllm_config)

    monkeypatch.setattr(VllmConfig, "__post_init__", limiting)
    chain = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}
    assert length(speculative_config=chain) == SHORT
    assert len(cut) == 2
    assert length(speculative_config=sequoia(size=8, draft=draft)) == 512
    assert len(cut) == 2
    assert length(speculative_config=chain) == SHORT  # it is there again


def test_the_embedded_pair_is_not_cut():
    assert configured(sequoia(), max_model_len=None).model_config.max_model_len == 2048
