"""Trees as large as the paper's for offloading: 768 nodes, 18 deep, up to 32 children."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engines import generated, runner_of, running, sequoia
from tests.support.generating import TINY, generate, generate_on, random_prompts, save_related_pair
from tests.support.interpreted import call_on_v2
from tests.support.models import prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

NODES, DEPTH, CHILDREN = 768, 18, 32
# The first child is accepted often enough for paths of that depth.
ACCEPTANCE = [0.7, *(0.066 / rank for rank in range(1, CHILDREN))]
LIMITS = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 2}
# Longer than what a tree of another request leaves of a step.
TEXTS = [prompts(1)[0], " ".join(prompts(24))[:4800]]


def large_tree(**keys) -> dict:
    schedule = [[1, 1, NODES - 1]]
    return sequoia(
        NODES, DEPTH, acceptance=ACCEPTANCE, num_speculative_tokens_per_batch_size=schedule, **keys
    )


def params() -> SamplingParams:
    """A copy each time: `LLM.generate` changes what it is given."""
    return SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


def test_alone_and_beside_a_prompt_that_is_read_in_pieces():
    with running(None, **LIMITS) as llm:
        expected = generated(llm, TEXTS, params())
    with running(large_tree(), **LIMITS) as llm:
        tree = runner_of(llm).tree
        alone = generated(llm, TEXTS[:1], params())
        [stats] = llm.collective_rpc("sequoia_stats", args=(True,))
        together, chunks = generate_in_steps(llm)
    assert (tree.size, tree.depth, tree.max_branch) == (NODES, DEPTH, CHILDREN)
    assert [*alone, *together] == [expected[0], *expected]
    assert chunks == 2
    assert stats["tokens"] / stats["tree_steps"] > 3


def generate_in_steps(llm) -> tuple[list[list[int]], int]:
    """Tokens of both requests, the second one joining later; and the steps that read its prompt."""
    engine, tokens, step = llm.llm_engine, {}, 0
    engine.add_request("0", TEXTS[0], params())
    engine.step()  # the prompt
    engine.add_request("1", TEXTS[1], params())
    while engine.has_unfinished_requests():
        step += 1
        for output in engine.step():
            if output.request_id == "1" and "1" not in tokens:
                chunks = step
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return [tokens["0"], tokens["1"]], chunks


def generate_both(models: str) -> dict[str, Any]:
    common = {"ignore_eos": True, "detokenize": False}
    greedy = SamplingParams(temperature=0, max_tokens=6, **common)
    target, draft = save_related_pair(Path(models), max_position_embeddings=2048)
    requests, engine = random_prompts([9]), {"model": target, **TINY, **LIMITS, "max_num_seqs": 1}
    answers = {"plain": generate(None, requests, greedy, **engine)}
    with running(large_tree(draft=draft), **engine) as llm:
        tree = runner_of(llm).tree
        answers["trees"] = generate_on(llm, requests, greedy)
        answers["sampled"] = generate_on(llm, requests, SamplingParams(max_tokens=3, **common))
    return {**answers, "tree": [tree.size, tree.depth, tree.max_branch]}


def test_on_v2_with_the_attention_and_the_commit_of_gpus(tmp_path):
    answers = call_on_v2(generate_both, tmp_path, models=str(tmp_path), gpu_attention=True)
    assert answers["tree"] == [NODES, DEPTH, CHILDREN]
    assert answers["trees"]["tokens"] == answers["plain"]["tokens"]
    assert answers["trees"]["counts"]["tokens_per_tree"] > 2
    assert answers["sampled"]["counts"]["tree_steps"] >= 1
    assert len(answers["sampled"]["tokens"][0][0]) == 3
