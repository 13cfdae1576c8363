"""Sliding windows, soft caps and sinks on vLLM's GPU engine: tokens as plain, from its graphs."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.architectures import VOCABULARY, save_architecture
from tests.support.calling import called_once
from tests.support.engines import cache_kinds, leave_nan, runner_of, sequoia
from tests.support.generating import random_prompts
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import (
    counting_modes,
    generate,
    generate_with_trees,
    rehearsing,
)

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

# Two have windows of 40 tokens, which end in prompts and in completions.
LENGTHS = [9, 60]
TOKENS = 11
SIZE, DEPTH = 8, 4
BUDGET = 40  # the second prompt ends beside the first one's trees
NAMES = ("mistral", "gemma2", "gemma4")


def start_and_generate(models: str, names: list[str]) -> dict[str, Any]:
    """Answers of plain vLLM, and of each model that drafts for itself."""
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
            with counting_modes(runner_of(llm)) as modes:
                trees = generate_with_trees(llm, requests, params)
            kinds = sorted(cache_kinds(llm))
            backend = runner_of(llm).attn_groups[0][0].backend.__name__
        answers[name] = {
            "plain": plain, "trees": trees, "kinds": kinds, "backend": backend,
            "modes": dict(modes),
        }  # fmt: skip
    return answers


generated = called_once(call_on_gpu, start_and_generate, names=NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_drafts_for_itself(name, generated):
    trees = generated[name]["trees"]
    # vLLM takes Triton's where heads have two sizes, without a FlashAttention for both.
    backend = "TritonTreeBackend" if name == "gemma4" else "FlashTreeBackend"
    assert generated[name]["backend"] == backend
    assert trees["tokens"] == generated[name]["plain"]["tokens"]
    # The first token of each request is its prompt's; then five at a time.
    assert trees["counts"]["drafts"] == len(LENGTHS) * (TOKENS - 1) / (DEPTH + 1)
    assert trees["counts"]["accepted_tokens"] == trees["counts"]["drafts"] * DEPTH


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_grown_and_scored_by_graphs(name, generated):
    trees = generated[name]["trees"]
    assert trees["graphs"]["TreeGraphManager"] > 1
    assert trees["graphs"]["DraftGraphs"] > 1
    assert trees["eager growth"] == trees["eager reads"] == []
    # The second prompt ends beside trees. Steps of more than 32 tokens have no graphs here.
    assert generated[name]["modes"]["FULL beside prompts"] > 0


def test_windows_lie_in_cache_groups_of_their_own(generated):
    assert generated["mistral"]["kinds"] == ["SlidingWindowSpec"]
    assert generated["gemma2"]["kinds"] == ["FullAttentionSpec", "SlidingWindowSpec"]
