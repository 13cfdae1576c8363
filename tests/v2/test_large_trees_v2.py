"""A tree of hundreds of nodes on Model Runner V2: kernels with wide masks and many levels."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engines import runner_of, running
from tests.support.generating import TINY, generate, generate_on, random_prompts, save_related_pair
from tests.support.large_trees import CHILDREN, DEPTH, NODES, large_tree
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

LIMITS = {**TINY, "max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 1}


def generate_both(models: str) -> dict[str, Any]:
    """Answers of plain V2, and of trees; and of trees two more tokens that are sampled."""
    common = {"ignore_eos": True, "detokenize": False}
    greedy = SamplingParams(temperature=0, max_tokens=6, **common)
    target, draft = save_related_pair(Path(models), max_position_embeddings=2048)
    requests, engine = random_prompts([9]), {"model": target, **LIMITS}
    answers = {"plain": generate(None, requests, greedy, **engine)}
    with running(large_tree(draft=draft), **engine) as llm:
        tree = runner_of(llm).tree
        answers["trees"] = generate_on(llm, requests, greedy)
        answers["sampled"] = generate_on(llm, requests, SamplingParams(max_tokens=3, **common))
    return {**answers, "tree": [tree.size, tree.depth, tree.max_branch]}


def test_a_tree_as_large_as_the_papers_for_offloading(tmp_path):
    """With the attention and the commit of GPUs."""
    answers = call_on_v2(generate_both, tmp_path, models=str(tmp_path), gpu_attention=True)
    assert answers["tree"] == [NODES, DEPTH, CHILDREN]
    assert answers["trees"]["tokens"] == answers["plain"]["tokens"]
    assert answers["trees"]["counts"]["tokens_per_tree"] > 2
    assert answers["sampled"]["counts"]["tree_steps"] >= 1
    assert len(answers["sampled"]["tokens"][0][0]) == 3
