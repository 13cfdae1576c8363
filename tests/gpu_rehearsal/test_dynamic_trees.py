"""Dynamic trees on the GPU engine: graphs grow them, and each request's pass is by its own tree."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.gpu_rehearsal.test_requests import ABORTED, LENGTHS, LONG, MAX_LEN, TIERS, decide_often
from tests.support.calling import called_once
from tests.support.engines import runner_of, scheduler_of, sequoia
from tests.support.generating import greedy_and_seeded, random_prompts, save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.rehearsing import (
    generate,
    generate_with_trees,
    join_and_abort,
    recording_versions,
    rehearsing,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]


def run(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of dynamic trees: greedy, joining, beside others."""
    target, draft = save_related_pair(Path(models))
    requests, long = random_prompts(LENGTHS), random_prompts(LONG)
    greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
    mixed = greedy_and_seeded(len(LENGTHS), 14)
    options = {"model": target, "max_num_seqs": 4, "max_model_len": MAX_LEN}
    with rehearsing(None, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, requests, greedy)}
        answers["plain mixed"] = generate(llm, requests, mixed)
        answers["plain long"] = generate(llm, long, greedy)
    config = sequoia(
        size=8, depth=3, draft=draft, num_speculative_tokens_per_batch_size=TIERS, adapt=True,
        dynamic_tree=True,
    )  # fmt: skip
    with recording_versions() as kernels, rehearsing(config, as_users_start=True, **options) as llm:
        started, counts = set(kernels), runner_of(llm).stats
        scheduler_of(llm).end_adaptation()  # decided on below
        for name, params in (("greedy", greedy), ("mixed", mixed)):
            answers[name] = generate_with_trees(llm, requests, params)
        answers["late"] = sorted(kernels - started)
        answers["any"] = decide_often(llm, requests, most=[7] * 5, params=[greedy] * len(requests))
        answers["long"] = join_and_abort(llm, long, [greedy] * len(LONG), ABORTED)
        generate(llm, requests[:1], greedy)
        answers["scored"] = counts.counts.scored_nodes.tolist()
    return answers


answers = called_once(call_on_gpu, run)


@pytest.mark.parametrize("name", ["greedy", "mixed"])
def test_tokens_are_those_of_plain_vllm_from_graphs(name, answers):
    """Where one request samples, all have the engine's tree."""
    plain = answers["plain" if name == "greedy" else "plain mixed"]
    assert answers[name]["tokens"] == plain["tokens"]
    assert answers[name]["eager growth"] == answers[name]["eager reads"] == []
    assert answers[name]["counts"]["tokens_per_tree"] > 1.3
    static, trees = answers[name]["counts"]["offered"][0][0], answers[name]["counts"]["tree_steps"]
    assert static < trees / 4 if name == "greedy" else static > trees / 2


def test_numbers_of_drafts_may_change_and_requests_join_among_prompts(answers):
    plain, long = answers["plain"]["tokens"], answers["plain long"]["tokens"]
    assert answers["any"]["tokens"] == plain
    assert answers["long"]["tokens"] == long[:ABORTED] + long[ABORTED + 1 :]
    assert answers["long"]["counts"]["tokens_per_tree"] > 1.3
    assert answers["long"]["eager reads"] == answers["long"]["eager growth"] == []
    assert answers["long"]["modes"]["FULL beside prompts"] > 0


def test_they_are_counted_by_node_and_compiled_at_the_start(answers):
    assert answers["scored"][0] > 3
    assert answers["late"] == []
