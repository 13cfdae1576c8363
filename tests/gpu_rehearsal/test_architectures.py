"""Windows, soft caps, sinks, caches in fp8 on vLLM's GPU engine: tokens as plain, from graphs."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.architectures import VOCABULARY, save_architecture
from tests.support.calling import called_once
from tests.support.engines import cache_kinds, leave_nan, runner_of, sequoia
from tests.support.generating import random_prompts, save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.rehearsing import generate, generate_with_trees, noting_modes, rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

# Two have windows of 40 tokens, which end in prompts and in completions.
LENGTHS = [9, 60]
TOKENS = 11
SIZE, DEPTH = 8, 4
BUDGET = 40  # the second prompt ends beside the first one's trees
NAMES = ("mistral", "gemma2", "gemma4")


def start_and_generate(models: str, names: list[str]) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    requests = random_prompts(LENGTHS, VOCABULARY)
    answers = {}
    for name in names:
        layers = None if name == "gemma4" else 2  # it describes each of its layers
        model = str(save_architecture(Path(models) / name, name, layers=layers))
        with rehearsing(None, model=model, max_num_seqs=2) as llm:
            plain = generate(llm, requests, params)
        with rehearsing(
            sequoia(SIZE, DEPTH, draft=model), model=model, max_num_seqs=2,
            max_num_batched_tokens=BUDGET,
        ) as llm:  # fmt: skip
            leave_nan(llm)
            with noting_modes(runner_of(llm)) as modes:
                trees = generate_with_trees(llm, requests, params)
            kinds = sorted(cache_kinds(llm))
            backend = runner_of(llm).attn_groups[0][0].backend.__name__
        answers[name] = {
            "plain": plain, "trees": trees, "kinds": kinds, "backend": backend, "modes": modes
        }  # fmt: skip
    return answers


generated = called_once(call_on_gpu, start_and_generate, names=NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_drafts_for_itself_from_graphs(name, generated):
    trees = generated[name]["trees"]
    # vLLM takes Triton's where heads have two sizes, without a FlashAttention for both.
    backend = "TritonTreeBackend" if name == "gemma4" else "FlashTreeBackend"
    assert generated[name]["backend"] == backend
    assert trees["tokens"] == generated[name]["plain"]["tokens"]
    # The first token of each request is its prompt's; then five at a time.
    assert trees["counts"]["drafts"] == len(LENGTHS) * (TOKENS - 1) / (DEPTH + 1)
    assert trees["counts"]["accepted_tokens"] == trees["counts"]["drafts"] * DEPTH
    assert min(trees["graphs"][kind] for kind in ("TreeGraphManager", "DraftGraphs")) > 1
    assert trees["eager growth"] == trees["eager reads"] == []
    # The second prompt ends beside trees. Steps of more than 32 tokens have no graphs here.
    assert "FULL beside prompts" in generated[name]["modes"]


def test_windows_lie_in_cache_groups_of_their_own(generated):
    assert generated["mistral"]["kinds"] == ["SlidingWindowSpec"]
    assert generated["gemma2"]["kinds"] == ["FullAttentionSpec", "SlidingWindowSpec"]


# -- A KV cache in fp8: trees read what plain decoding reads of it ---------------------------


def generate_from_fp8(models: str, backend: str) -> dict[str, Any]:
    """Answers of plain vLLM and of trees, with scales that are not 1."""
    target, draft = save_related_pair(Path(models))
    options = {"model": target, "kv_cache_dtype": "fp8"}
    requests, trees = random_prompts([9, 40, 13]), sequoia(size=8, depth=3, draft=draft)
    common = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(temperature=0, **common)] * 2
    params.append(SamplingParams(temperature=0.8, seed=3, **common))
    answers: dict[str, Any] = {}
    for name, config, attention in (("plain", None, "FLASH_ATTN"), ("trees", trees, backend)):
        with rehearsing(config, attention_backend=attention, **options) as llm:
            for layer in layers(llm):
                layer._q_scale.fill_(0.5)
                layer._k_scale.fill_(0.25)
                layer._v_scale.fill_(2.0)
            run = generate if config is None else generate_with_trees
            answers[name] = run(llm, requests, params)
            answers[f"{name}: bytes"] = runner_of(llm).kv_caches[0].element_size()
    return answers


def layers(llm: Any) -> list[Any]:
    context = runner_of(llm).vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if hasattr(layer, "_k_scale")]


BACKENDS = ["FLASH_ATTN", "TRITON_ATTN"]
of_fp8 = called_once(call_on_gpu, generate_from_fp8, ("backend", BACKENDS))


def test_tokens_are_those_of_plain_vllm_with_the_same_cache(of_fp8):
    """By FlashAttention: vLLM's Triton kernel rounds weights of attention, and ours does not."""
    assert of_fp8["trees"]["tokens"] == of_fp8["plain"]["tokens"]
    assert of_fp8["trees"]["counts"]["tokens_per_tree"] > 1.2
    assert of_fp8["trees"]["eager growth"] == []
    assert (of_fp8["plain: bytes"], of_fp8["trees: bytes"]) == (1, 1)
