"""Mistakes in Model Runner V2 show in what an engine answers: `mutants_by_hand.toml`."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import generating
from tests.support.calling import called_once
from tests.support.engines import generated, running, whole_trees
from tests.support.generating import TINY
from tests.support.interpreted import call_on_v2
from tests.support.mutating import assert_shown, mutants

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

REQUESTS = generating.random_prompts([9, 14, 11, 20]), generating.greedy_and_seeded(4, 16)
V2 = mutants("v2")


def run(models: str) -> dict[str, Any]:
    """One engine's answers with each mistake; no prefix cache keeps wrong keys."""
    target, draft = generating.save_related_pair(Path(models))
    with running(None, model=target, **TINY) as llm:
        found: dict[str, Any] = {"plain": generated(llm, *REQUESTS)}
    trees = whole_trees(size=8, depth=3, draft=draft)
    with running(trees, model=target, enable_prefix_caching=False, **TINY) as llm:
        found["before"] = answers(llm)
        for name, mutant in V2.items():
            with mutant.applied(Path(models)):
                found[name] = answers(llm)
        found["after"] = answers(llm)
    return found


def answers(llm: Any) -> dict[str, Any]:
    counts = generating.counted
    return {"tokens": generated(llm, *REQUESTS), "accepted": counts(llm)["depth_counts"]}


found = called_once(call_on_v2, run)


@pytest.mark.parametrize("name", V2)
def test_an_engine_shows(name, found):
    assert_shown(V2[name], found[name], found["before"])


def test_an_engine_without_mutants_answers_like_plain_vllm(found):
    assert found["before"]["tokens"] == found["plain"]
    assert found["after"] == found["before"]
