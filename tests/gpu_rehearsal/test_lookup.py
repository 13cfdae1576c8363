"""Trees drafted without a model on vLLM's GPU engine: started, captured, replayed."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.calling import called_once
from tests.support.engines import lookup_trees
from tests.support.generating import random_prompts, save_related_pair
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import check_replayed, plain_and_trees

pytestmark = pytest.mark.engine


def start_and_generate(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees for batches of three and of one."""
    target, _ = save_related_pair(Path(models))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    texts = random_prompts([5, 9, 20])
    return plain_and_trees(lookup_trees(size=8), target, texts, params)


answers = called_once(call_on_gpu, start_and_generate)


@pytest.mark.parametrize("name", ["trees", "alone"])
def test_tokens_are_those_of_plain_vllm_from_graphs(name, answers):
    check_replayed(answers[name], answers["plain"])


def test_what_followed_before_is_accepted(answers):
    assert answers["trees"]["counts"]["tokens_per_tree"] > 1.05
