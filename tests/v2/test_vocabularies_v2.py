"""Drafts with another vocabulary on Model Runner V2: are tokens the target's, and any accepted?"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.generating import (
    TINY,
    VOCAB,
    generate,
    generate_with_trees,
    greedy_and_seeded,
    random_prompts,
    save_related_pair,
)
from tests.support.models import save_word_tokenizer
from tests.support.on_v2 import call_on_v2
from tests.support.vocabularies import save_renumbered, save_words

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

WITH_TOKENIZERS = {**TINY, "skip_tokenizer_init": False}


def other_draft(draft: str, path: Path, shared: float) -> str:
    """The draft with all tokens renumbered, and of so many of them the target's text."""
    generator = torch.Generator().manual_seed(2)
    number_of = torch.randperm(VOCAB + 20, generator=generator)[:VOCAB]
    kept = torch.rand(VOCAB, generator=generator) < shared
    words = {
        f"w{token}" if kept[token] else f"other {token}": int(number_of[token])
        for token in range(VOCAB)
    }
    save_renumbered(draft, path, number_of, VOCAB + 20)
    save_words(path, words, {})
    return str(path)


def generate_with_other_vocabularies(models: str) -> dict[str, Any]:
    """Answers of plain V2, and of trees by a draft as it is, renumbered, with half its tokens."""
    target, draft = save_related_pair(Path(models))
    save_word_tokenizer(Path(target))
    requests = random_prompts([12, 30, 5, 41]), greedy_and_seeded(4, 16)
    drafts = {
        "same": draft,
        "renumbered": other_draft(draft, Path(models) / "renumbered", shared=1.0),
        "half": other_draft(draft, Path(models) / "half", shared=0.5),
    }
    answers = {"plain": generate(None, *requests, model=target, **TINY)}
    for name, path in drafts.items():
        options = TINY if name == "same" else WITH_TOKENIZERS
        answers[name] = generate_with_trees(path, *requests, model=target, **options)
    return answers


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("vocabularies")
    return call_on_v2(generate_with_other_vocabularies, directory, models=str(directory))


@pytest.mark.parametrize("draft", ["renumbered", "half"])
def test_tokens_are_those_of_plain_vllm(draft, generated):
    """Greedy requests, and seeded ones."""
    assert generated[draft]["runner"] == "SequoiaCPUModelRunnerV2"
    assert generated[draft]["tokens"] == generated["plain"]["tokens"]


def test_renumbered_tokens_are_accepted_as_often_as_the_same(generated):
    same, renumbered = (generated[draft]["counts"] for draft in ("same", "renumbered"))
    for name in ("tree_steps", "tokens", "depth_counts", "offered", "accepted"):
        assert renumbered[name] == same[name]
    assert same["tokens_per_tree"] > 1.5


def test_half_of_the_tokens_are_worth_something(generated):
    same, half = (generated[draft]["counts"]["tokens_per_tree"] for draft in ("same", "half"))
    assert 1.1 < half < same
