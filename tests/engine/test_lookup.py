"""Drafts without a model, on both runners: what followed before tells what follows."""

from typing import Any

import pytest

from tests.support.engines import lookup_trees
from tests.support.generating import generate
from tests.support.models import prompts
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def generate_all() -> dict[str, Any]:
    """Answers of plain vLLM, and of trees: greedy, seeded and penalised requests."""
    from vllm import SamplingParams

    common = {"max_tokens": 24, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **common), SamplingParams(temperature=0.7, seed=4, **common),
        SamplingParams(temperature=0, repetition_penalty=1.2, **common),
    ]  # fmt: skip
    texts = [3 * text for text in prompts(3)]
    plain = generate(None, texts, params)
    trees = generate(lookup_trees(size=12), texts, params)
    return {"plain": plain["tokens"], "trees": trees["tokens"], "counts": trees["counts"]}


@pytest.fixture(scope="module", params=["V1", "V2"])
def answers(request, tmp_path_factory):
    if request.param == "V2":
        return call_on_v2(generate_all, tmp_path_factory.mktemp("lookup"))
    return generate_all()


def test_tokens_are_those_of_plain_vllm(answers):
    assert answers["trees"] == answers["plain"]


def test_what_followed_before_is_accepted(answers):
    assert answers["counts"]["tokens_per_tree"] > 1.3
