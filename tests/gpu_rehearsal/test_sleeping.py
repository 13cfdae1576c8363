"""Sleep without weights (level 2) on vLLM's GPU engine: what trees need besides them is there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.support.architectures import VOCABULARY, save_architecture
from tests.support.calling import called_once
from tests.support.engines import sequoia
from tests.support.generating import counted, random_prompts
from tests.support.interpreted import call_on_gpu
from tests.support.models import save_word_tokenizer
from tests.support.rehearsing import generate, generate_with_trees, rehearsing
from tests.support.sleeping import lost_of_ours, sleep_without_weights
from tests.support.vocabularies import save_renumbered, save_words

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

# The second begins beyond the target's window of 40 tokens.
LENGTHS = [9, 60, 21]
TOKENS = 10


def requests() -> list[Any]:
    """The sampled one's nucleus is a single token: its tokens are known, too."""
    common = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=0.8, top_p=1e-6, **common),
        SamplingParams(temperature=0, repetition_penalty=1.3, **common),
        SamplingParams(temperature=0, **common),
    ]


def save_other_draft(target: Path, path: Path) -> str:
    """The target without its windows, whose tokens have other numbers."""
    number_of = torch.randperm(VOCABULARY + 20, generator=torch.Generator().manual_seed(2))
    number_of = number_of[:VOCABULARY]
    save_renumbered(target, path, number_of, VOCABULARY + 20)
    save_words(path, {f"w{token}": int(number_of[token]) for token in range(VOCABULARY)}, {})
    return str(path)


def generate_and_sleep(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees before and after: windows, vocabulary, parameters.

    The draft keeps three quarters of its output layer.
    """
    from gpu_stand_in import sleeping

    target = save_architecture(Path(models) / "target", "mistral", layers=2)
    save_word_tokenizer(target)
    draft = save_other_draft(target, Path(models) / "draft")
    prompts, params = random_prompts(LENGTHS, VOCABULARY), requests()
    options: dict[str, Any] = {"model": str(target), "skip_tokenizer_init": False}
    with rehearsing(None, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, prompts, params)}
    allocator = sleeping.install()
    kept = list(range(0, VOCABULARY, 2)) + list(range(1, VOCABULARY, 4))
    config = sequoia(8, 3, draft=draft, draft_vocabulary=kept)
    with rehearsing(config, **options, enable_sleep_mode=True) as llm:
        generate(llm, prompts, params)  # of its last trees it is counted later
        counted(llm)
        llm.reset_prefix_cache()
        np.random.seed(0)  # vLLM draws seeds by it: drafts, too, are to be the same
        answers["before"] = generate_with_trees(llm, prompts, params)
        answers["lost"] = lost_of_ours(llm, allocator)
        sleep_without_weights(llm)
        np.random.seed(0)
        answers["after"] = generate_with_trees(llm, prompts, params)
    return answers


answers = called_once(call_on_gpu, generate_and_sleep)


def test_tokens_drafts_and_graphs_are_those_of_before(answers):
    before, after = answers["before"], answers["after"]
    assert answers["lost"] == []
    assert before["tokens"] == after["tokens"] == answers["plain"]["tokens"]
    per_tree = [found["counts"]["tokens_per_tree"] for found in (before, after)]
    assert per_tree[0] == per_tree[1] > 1.5
    assert after["graphs"] == before["graphs"]
