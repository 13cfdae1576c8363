"""Structured output on the GPU engine: masks for every node, beside requests without a grammar."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from tests.support.calling import called_once
from tests.support.engines import noting, runner_of, sequoia
from tests.support.interpreted import call_on_gpu
from tests.support.models import TARGET, prompts
from tests.support.rehearsing import generate, generate_with_trees, rehearsing

# CI follows grammars in `tests/v2/test_trees_v2.py`, and lays masks out in
# `tests/engine/test_grammar_masks.py`.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

REQUESTS = 4
LARGEST = 8
# The largest tree for one request, four nodes each for more.
TIERS = [[1, 1, LARGEST - 1], [2, REQUESTS, 3]]
MOST_SCORED = 4 * REQUESTS
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["self", "value"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}


def params() -> list[Any]:
    """With a grammar: greedy, seeded, edited, without drafts; and without one. Two have to wait."""
    sums = {"structured_outputs": StructuredOutputsParams(regex=r"[a-z]{3,8} = \d+( \+ [a-z]+)*")}
    json = {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}
    return [
        SamplingParams(temperature=0, max_tokens=14, **sums),
        SamplingParams(temperature=0, max_tokens=18, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, extra_args={MOST_DRAFTS: 0}, **sums),
        SamplingParams(temperature=0.8, seed=2, max_tokens=16, **sums),
        SamplingParams(temperature=0, max_tokens=16, **json),
        SamplingParams(temperature=0.8, seed=5, max_tokens=18, repetition_penalty=1.3, **json),
    ]


def run() -> dict[str, Any]:
    """Tokens of plain vLLM and of trees; the rows of every step, and of the memory for masks."""
    texts = prompts(len(params()))
    options = {"max_num_seqs": REQUESTS, "skip_tokenizer_init": False}
    with rehearsing(None, model=TARGET, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, texts, params())}
    trees = sequoia(size=LARGEST, depth=3, num_speculative_tokens_per_batch_size=TIERS)
    with rehearsing(trees, model=TARGET, **options) as llm:
        from sequoia_vllm.engine.v2.runner import TreeRunner  # once the stand-ins are in place

        with noting(TreeRunner, "sample", masks_of) as steps:
            answers["trees"] = generate_with_trees(llm, texts, params())
            generate(llm, texts[:1], params()[:1])  # alone, with the whole tree
        core = llm.llm_engine.engine_core.engine_core
        answers["memory"] = {
            "device": len(runner_of(llm).structured_outputs_worker.grammar_bitmask),
            "host": len(core.structured_output_manager._grammar_bitmask),
        }
    return {**answers, "steps": steps}


def masks_of(runner: Any, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
    """Of a step with masks: their number, and scored nodes of requests with a grammar or not."""
    if grammar_output is None:
        return None
    masked = set(grammar_output.structured_output_request_ids)
    nodes = {True: [], False: []}
    rows = np.diff(batch.cu_num_logits_np).tolist()
    for name, count in zip(batch.req_ids, rows, strict=True):
        nodes[name in masked].append(count)
    masks = len(grammar_output.grammar_bitmask)
    return {"masks": masks, "masked": nodes[True], "free": nodes[False]}


answers = called_once(call_on_gpu, run)


def test_grammars_are_followed_along_each_path(answers):
    """There are as many masks as nodes are scored, and room for what the schedule can score.

    With trees of two sizes, beside requests without a grammar, drafts, or either. The engine core
    asks one by one.
    """
    assert answers["trees"]["tokens"] == answers["plain"]["tokens"]
    assert answers["trees"]["counts"]["tokens_per_tree"] > 1.1
    steps = answers["steps"]
    assert all(step["masks"] == sum(step["masked"]) for step in steps)
    assert any(step["masked"] == [LARGEST] for step in steps)
    assert any({1, 4} <= set(step["masked"]) and 4 in step["free"] for step in steps)
    assert answers["memory"] == {"device": MOST_SCORED + REQUESTS, "host": 1}
