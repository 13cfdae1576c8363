"""Many requests on few tokens per step: running ones do not keep the others waiting."""

import pytest
from vllm import SamplingParams

from tests.support.engines import running, sequoia
from tests.support.models import prompts

pytestmark = pytest.mark.engine

REQUESTS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
# Prompts are read in pieces, and 4 trees of 16 nodes take all of a step.
LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": REQUESTS}


def run(config) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Tokens of each request, and the step in which it had its first."""
    with running(config, **LIMITS) as llm:
        engine, tokens, first = llm.llm_engine, {}, {}
        for place, text in enumerate(prompts(REQUESTS)):
            engine.add_request(str(place), text, PARAMS)
        step = 0
        while engine.has_unfinished_requests():
            step += 1
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                first.setdefault(output.request_id, step)
    return tokens, first


def test_prompts_are_read_while_others_decode():
    """They are read as soon as by plain vLLM, but for the half of each step that trees may take."""
    expected, plain = run(None)
    found, trees = run(sequoia())
    assert found == expected
    assert max(trees.values()) <= 2 * max(plain.values())
