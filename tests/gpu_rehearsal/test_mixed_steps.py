"""Steps that read prompts beside trees, on the GPU engine: tokens as plain's, from full graphs.

`test_requests.py` has shorter prompts in every run.
"""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.calling import called_once
from tests.support.engines import metric, runner_of, sequoia
from tests.support.generating import greedy_and_seeded, random_prompts, save_related_pair
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import generate, join_and_abort, rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

# Longer than a segment has rows, and than the budget leaves beside trees. The sixth begins like
# the second, and is of few rows over a context.
LENGTHS = [30, 300, 9, 470, 57, 260, 64, 33]
SHARED = 240
TOKENS = 12
ABORTED = 2


def run(models: str) -> dict[str, Any]:
    """Answers to arrivals: of plain vLLM, of trees, and of trees in little memory."""
    target, draft = save_related_pair(Path(models))
    requests = random_prompts(LENGTHS)
    requests[5]["prompt_token_ids"][:SHARED] = requests[1]["prompt_token_ids"][:SHARED]
    params = greedy_and_seeded(len(LENGTHS), TOKENS)
    options = {"model": target, "max_model_len": 500, "max_num_seqs": 4, "disable_log_stats": False}
    # The largest is vLLM's default where more requests run together.
    options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 64, 128, 512]}
    with rehearsing(None, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, requests, params)["tokens"]}
    trees = sequoia(size=8, depth=3, draft=draft)
    with rehearsing(trees, max_num_batched_tokens=512, **options) as llm:
        answers["arriving"] = join_and_abort(llm, requests, params, ABORTED)
        answers["hits"] = metric(llm, "vllm:prefix_cache_hits")
        answers["long"] = beyond_the_limits(llm, requests)
    with rehearsing(
        trees, max_num_batched_tokens=128, num_gpu_blocks_override=34, **options
    ) as llm:
        answers["pressed"] = join_and_abort(llm, requests, params, ABORTED)
    return answers


def beyond_the_limits(llm: Any, requests: list[Any]) -> list[bool]:
    """Whether the last step of a prompt was mixed: as it is, and for a lower limit each."""
    from sequoia_vllm.engine.v2 import runner_gpu

    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    found = []
    for limits in ({}, {"_MOST_READ": 30 * 30 - 1}, {"_LONGEST": 29}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(runner_gpu, name, value)
            assert llm.reset_prefix_cache()
            llm.generate(requests[:1], one, use_tqdm=False)
            found.append(runner_of(llm).cudagraph_manager.is_mixed)
    return found


answers = called_once(call_on_gpu, run)


@pytest.mark.parametrize("which", ["arriving", "pressed"])
def test_tokens_are_those_of_plain_vllm(which, answers):
    plain = answers["plain"]
    assert answers[which]["tokens"] == plain[:ABORTED] + plain[ABORTED + 1 :]
    assert answers[which]["counts"]["tokens_per_tree"] > 1.3


@pytest.mark.parametrize("which", ["arriving", "pressed"])
def test_every_step_with_trees_is_a_full_graph(which, answers):
    """Beside prompts, too, in chunks of up to 512 rows, and where trees are cut."""
    modes = answers[which]["modes"]
    assert set(modes) == {"FULL", "FULL beside prompts"}
    assert modes["FULL beside prompts"] > 3


def test_prompts_follow_contexts_that_other_requests_have_left(answers):
    assert answers["hits"] >= SHARED - 16


def test_requests_are_preempted_where_memory_is_short(answers):
    assert answers["pressed"]["counts"]["preemptions"] > 0


def test_long_prompts_and_long_requests_stay_with_vllms_attention(answers):
    assert answers["long"] == [True, False, False]
