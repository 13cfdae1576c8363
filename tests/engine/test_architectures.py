"""Targets with windows, soft caps, sinks, experts, latents: greedy tokens are plain vLLM's.

Windows are of 40 tokens, and prompts and completions go beyond. A model that drafts for itself
is right in every draft, unless attention over its own trees is wrong: so it tests drafts, too.
"""

import pytest
from vllm import SamplingParams

from sequoia_vllm.engine.core.prediction_option import PREDICTION
from sequoia_vllm.engine.v1.draft_progress import DraftProgressV1
from tests.support.architectures import CONFIGS, VOCABULARY, save_architecture
from tests.support.engines import (
    cache_kinds,
    generated,
    lookup_trees,
    metric,
    noting,
    plain_outputs,
    running,
    sequoia,
    whole_trees,
)
from tests.support.generating import greedy_and_seeded, random_prompts
from tests.support.latents import ON_CPUS as LATENTS_ON_CPUS
from tests.support.latents import VOCABULARY as LATENT_VOCABULARY
from tests.support.latents import save_latent_pair
from tests.support.models import save_llama

pytestmark = pytest.mark.engine

LENGTHS = [5, 37, 90, 200]
PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
# A block is 128 tokens here, unless told otherwise: windows end within blocks, and at their ends.
OPTIONS = {"skip_tokenizer_init": True, "block_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("architectures")
    for name in ON_CPUS:
        save_architecture(folder / name, name)
    save_llama(folder / "draft", seed=1, vocab_size=VOCABULARY, max_position_embeddings=1024)
    return folder


# Others have what these have: windows, experts.
LIKE_OTHERS = {"gemma3", "mixtral", "qwen3_moe"}
ON_CPUS = [name for name in CONFIGS if name != "llama4"]  # chunks are for GPUs


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.sharded] * (n in LIKE_OTHERS)) for n in ON_CPUS]
)
def test_a_model_that_drafts_for_itself(folder, name):
    options = {"model": str(folder / name), **OPTIONS}
    prompts = random_prompts(LENGTHS, VOCABULARY)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain = plain_outputs(prompts, params, **options)
    with running(sequoia(16, draft=folder / name), **options) as llm:
        assert generated(llm, prompts, params) == plain
        # 60 tokens of 4 requests, the first of each from its prompt: five at a time.
        assert metric(llm, "vllm:spec_decode_num_drafts") == 4 * 12
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") == 4 * 48


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_branches_deeper_than_windows(folder, name):
    """What is foretold is right, unless attention over its branch is wrong."""
    options = {"model": str(folder / name), **OPTIONS}
    prompts = random_prompts(LENGTHS, VOCABULARY)
    plain = plain_outputs(prompts, PARAMS, **options)
    foretold = [PARAMS.clone() for _ in plain]
    for params, tokens in zip(foretold, plain, strict=True):
        params.extra_args = {PREDICTION: tokens}
    with running(whole_trees(16, draft=folder / "draft"), **options) as llm:
        for prompt, params, tokens in zip(prompts, foretold, plain, strict=True):
            assert generated(llm, [prompt], [params]) == [tokens]
        assert metric(llm, "vllm:spec_decode_num_drafts") < 4 * 100 / 8


def test_chunked_local_attention_is_for_gpus(tmp_path):
    model = str(save_architecture(tmp_path / "llama4", "llama4"))
    refused = pytest.raises(ValueError, match="chunked local attention are for GPUs")
    with refused, running(lookup_trees(), model=model, **OPTIONS):
        pass


def test_layers_that_read_the_keys_of_others(folder):
    """Their cache is another layer's, whose accepted keys move once."""
    options = {"model": str(folder / "gemma3n"), **OPTIONS}
    noisy = save_architecture(folder / "noisy", "gemma3n", noise=0.1)
    prompts = random_prompts(LENGTHS, VOCABULARY)
    plain = plain_outputs(prompts, PARAMS, **options)
    with running(sequoia(16, depth=3, draft=noisy), **options) as llm:
        assert generated(llm, prompts, PARAMS) == plain
        trees = metric(llm, "vllm:spec_decode_num_drafts")
        assert trees < metric(llm, "vllm:spec_decode_num_accepted_tokens") < 2.9 * trees


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        # vLLM gives the target's window to a draft without one.
        ("mistral", {"SlidingWindowSpec"}),
        ("gemma2", {"FullAttentionSpec"}),
        pytest.param("gpt_oss", {"FullAttentionSpec"}, marks=pytest.mark.sharded),
    ],
)
def test_windows_with_a_cache_too_small(folder, name, kinds):
    """What lies before a window is given to others; a shared prefix is found in the cache."""
    options = {
        "model": str(folder / name), **OPTIONS, "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 1 << 20,
    }  # fmt: skip
    prompts = random_prompts([200, 90, 37, 5, 150, 120, 33], VOCABULARY)
    prompts.insert(4, prompts[0])

    plain = plain_outputs(prompts, PARAMS, **options)
    with running(sequoia(16, draft=folder / "draft"), **options) as llm:
        for _ in range(2):
            assert generated(llm, prompts, PARAMS) == plain
        assert metric(llm, "vllm:prefix_cache_hits") > 0
        assert metric(llm, "vllm:num_preemptions") > 0
        assert metric(llm, "vllm:spec_decode_num_drafts") > 100
        assert cache_kinds(llm) == kinds


def test_a_prompt_in_the_prefix_cache_is_not_read_again(folder):
    """Before a window there are null blocks in place of what the draft has read."""
    options = {"model": str(folder / "mistral"), **OPTIONS, "enable_prefix_caching": True}
    prompts = random_prompts([200], VOCABULARY)
    with (
        noting(DraftProgressV1, "_note_read", lambda progress, request, start, end: start) as read,
        running(sequoia(16, draft=folder / "mistral"), **options) as llm,
    ):
        first = generated(llm, prompts, PARAMS)
        assert read[0] == 0
        read.clear()
        assert generated(llm, prompts, PARAMS) == first
        assert read[0] == metric(llm, "vllm:prefix_cache_hits") == 192
        assert metric(llm, "vllm:spec_decode_num_drafts") == 2 * 20


def test_a_draft_that_fell_behind_its_window(folder):
    """While it rests, vLLM gives the blocks before windows to others.

    Six short requests make the batch too large for drafts; two long ones outlive them.
    """
    model = folder / "mistral"
    options = {"model": str(model), **OPTIONS, "kv_cache_memory_bytes": 3 << 19}
    prompts = random_prompts([150, 130, 60, 61, 62, 63, 64, 65], VOCABULARY)
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for tokens in (220, 240, 90, 100, 110, 90, 100, 110)
    ]
    plain = plain_outputs(prompts, params, **options)
    config = sequoia(16, draft=model)
    config["num_speculative_tokens_per_batch_size"] = [[1, 2, 15], [3, 8, 0]]
    with running(config, **options) as llm:
        assert generated(llm, prompts, params) == plain
        trees = metric(llm, "vllm:spec_decode_num_drafts")
        # Hardly any draft was wrong: only those that looked at what was taken away.
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 2.5 * trees > 100
        assert cache_kinds(llm) == {"SlidingWindowSpec"}


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_latent_attention(disabled, tmp_path, monkeypatch):
    """Three requests at a time: a prompt is read beside trees."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", disabled)
    target, draft = save_latent_pair(tmp_path)
    prompts, params = random_prompts([5, 37, 90, 20], LATENT_VOCABULARY), greedy_and_seeded(4, 40)
    options = {"model": target, "skip_tokenizer_init": True, "max_num_seqs": 3, **LATENTS_ON_CPUS}
    plain = plain_outputs(prompts, params, **options)
    with running(sequoia(16, draft=draft, dynamic_tree=True), **options) as llm:
        assert generated(llm, prompts, params) == plain
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 30
        assert llm.llm_engine.model_config.use_mla == (disabled == "0")
