"""Trees of hundreds of nodes: alone, and beside prompts that are read in pieces."""

import pytest
from vllm import SamplingParams

from tests.support.engines import runner_of, running, tokens_of
from tests.support.large_trees import CHILDREN, DEPTH, NODES, large_tree
from tests.support.models import prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

LIMITS = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 2}
# Longer than what a tree of another request leaves of a step.
TEXTS = [prompts(1)[0], " ".join(prompts(24))[:4800]]


def params() -> SamplingParams:
    """A copy each time: `LLM.generate` changes what it is given."""
    return SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


def test_a_tree_as_large_as_the_papers_for_offloading():
    with running(None, **LIMITS) as llm:
        expected = tokens_of(llm.generate(TEXTS, params(), use_tqdm=False))
    with running(large_tree(), **LIMITS) as llm:
        tree = runner_of(llm).tree
        alone = tokens_of(llm.generate(TEXTS[:1], params(), use_tqdm=False))
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
