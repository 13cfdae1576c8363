"""Requests that join, end, are aborted and preempted, on the GPU engine under its graphs."""

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from sequoia_vllm.engine.common.patched import patched
from tests.support.calling import called_once
from tests.support.engines import metric, noting, runner_of, scheduler_of, sequoia
from tests.support.generating import greedy_and_seeded, joined, random_prompts, save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.rehearsing import (
    counting_eager,
    flash_reads,
    generate,
    generate_with_trees,
    join_and_abort,
    rehearsing,
    since,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = [30, 21, 9, 17, 40, 5, 12]
TOKENS, MAX_LEN = 14, 512
ABORTED = 2
# Prompts that the draft reads beside the trees of up to three others, 512 rows in all.
LONG = [200, 460, 9, 90, 330, 61]
# Two sizes of trees, and none at four requests.
TIERS = [[1, 2, 7], [3, 3, 3], [4, 4, 0]]
DECIDED = [7, 1, 3, 0, 1]  # each for three steps


def params(lengths: list[int] = LENGTHS) -> list[Any]:
    return greedy_and_seeded(len(lengths), TOKENS)


def run(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, of trees in tiers over `TRITON_ATTN`, and of trees short of room.

    The contexts of the last are read by FlashAttention.
    """
    from gpu_stand_in import flash_attention, graphs

    target, draft = save_related_pair(Path(models))
    requests, long = random_prompts(LENGTHS), random_prompts(LONG)
    options = {"model": target, "max_num_seqs": 4}
    with rehearsing(None, **options, max_model_len=MAX_LEN) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, requests, params())}
        answers["plain long"] = generate(llm, long, params(LONG))
    # Here, as an engine has put the stand-ins in place.
    from sequoia_vllm.engine.v2.graph_times import ReplayClock

    tiers = sequoia(
        size=8, depth=3, draft=draft, num_speculative_tokens_per_batch_size=TIERS, adapt=True
    )
    before = graphs.report()
    with (
        noting(ReplayClock, "time", lambda clock, graph, replay: graph) as timed,
        rehearsing(tiers, **options, max_model_len=MAX_LEN, attention_backend="TRITON_ATTN") as llm,
    ):
        answers["timed"] = {"graphs": sorted(timed), "held": uniform_graphs(llm), **since(before)}
        times = [deepcopy(scheduler_of(llm).adapter.controller._times)]
        generate(llm, requests[:1], params()[:1])
        times.append(scheduler_of(llm).adapter.controller._times)
        answers["timed"]["times"] = [[one.seconds(n, 1) for n in (0, 3, 7)] for one in times]
        scheduler_of(llm).end_adaptation()  # decided on below
        answers["tiers"] = generate_with_trees(llm, requests, params())
        answers["any"] = decide_often(llm, requests, most=[7] * 5, params=params())
        scheduled = scheduler_of(llm).dynamic_sd_lookup
        # Of four, nobody drafts.
        answers["fewer"] = decide_often(llm, requests[:3], scheduled, params()[:3])
        answers["joining"] = join_and_abort(llm, requests, params(), ABORTED)
        answers["long"] = join_and_abort(llm, long, params(LONG), ABORTED)
        answers["timed"]["captured later"] = since(before)["captured"]
        answers["least token"] = int(runner_of(llm).speculator.drafted.tokens.min())
    # Blocks for two or three requests; eight nodes at once of each, of 26 at most.
    parents = [-1, *[0] * 8, *range(1, 9)]
    wide = {
        "method": "sequoia", "model": draft, "tree": {"parents": parents},
        "num_speculative_tokens_per_batch_size": [[1, 4, len(parents) - 1]],
    }  # fmt: skip
    from sequoia_vllm.engine.v2 import runner_gpu  # here: an engine has put the stand-ins in place

    flash_attention.attended.clear()
    with (
        flash_reads(rows=0, product=0),
        patched(runner_gpu, "_MOST_READ", -1),  # no graphs beside prompts, where we have all rows
        rehearsing(
            wide, **options, max_model_len=80, num_gpu_blocks_override=8, max_num_batched_tokens=26,
        ) as llm,
    ):  # fmt: skip
        flash_attention.causal_rows.clear()
        with noting(scheduler_of(llm), "schedule", rows_of, of_result=True) as rows:
            answers["pressed"] = generate_with_trees(llm, requests, params())
        (cache,) = runner_of(llm)._target_caches.values()
        attended = flash_attention.causal_rows[cache.data_ptr()]
        answers["pressed"] |= {"rows": sum(rows, Counter()), "attended rows": attended}
    answers["pressed"]["over contexts"] = flash_attention.attended[False]
    return answers


def uniform_graphs(llm: Any) -> list[tuple[str, int, int]]:
    """All graphs of decode steps: what they do, tokens or drafts of each request, requests."""
    runner = runner_of(llm)
    held = {"target": runner.cudagraph_manager, **runner.speculator.graphs}
    shapes = [(kind, shape) for kind, one in held.items() for shape in one.graphs]
    found = [(kind, shape.uniform_token_count, shape.num_reqs) for kind, shape in shapes]
    return sorted(graph for graph in found if graph[1])


def rows_of(output: Any) -> Counter[str]:
    """Rows that a step schedules: of trees, and others in steps with trees or not."""
    drafts, rows = output.scheduled_spec_decode_tokens, Counter()
    beside = "beside trees" if drafts else "alone"
    for request, scheduled in output.num_scheduled_tokens.items():
        rows["of trees" if drafts.get(request) else beside] += scheduled
    return rows


def decide_often(
    llm: Any, requests: list[Any], most: list[int], params: list[Any]
) -> dict[str, Any]:
    """Decides like an engine that adapts: other numbers of drafts, bounded by batch size."""
    from gpu_stand_in import graphs

    lookup, most = scheduler_of(llm).dynamic_sd_lookup, list(most)
    configured = list(lookup)

    def decide(step: int) -> None:
        drafts = DECIDED[step // 3 % len(DECIDED)]
        lookup[:] = [min(drafts, bound) for bound in most]

    before = graphs.report()
    with counting_eager() as eager:
        tokens = joined(llm, requests, params, every=0, before_step=decide)
    lookup[:] = configured
    return {"tokens": tokens, "graphs": since(before)["replayed"], **eager}


answers = called_once(call_on_gpu, run)


def test_an_engine_that_adapts_has_timed_each_graph_before_it_serves(answers):
    """Each three times, and no other; none is captured later. The core has the times at once."""
    found = answers["timed"]
    assert found["graphs"] == found["held"]
    assert {kind for kind, _, _ in found["held"]} == {"target", "read", "growth"}
    assert sum(found["replayed"].values()) == 3 * len(found["held"])
    assert found["captured"] == found["captured later"]
    assumed, measured = found["times"]
    assert 1.0 <= assumed[0] < assumed[2]  # relative to a pass that reads the weights
    assert 0 < measured[0] < measured[2] != assumed[2]


def test_tiers_of_a_schedule_are_replayed(answers):
    found = answers["tiers"]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert found["eager growth"] == []
    assert found["graphs"]["DraftGraphs"] > 3
    assert found["counts"]["tokens_per_tree"] > 1.3


def test_numbers_of_drafts_may_change_in_any_step(answers):
    """Fewer than the schedule's have graphs: one is in no tier, three are at other batch sizes.

    vLLM marks what it did not ask for with -1. A row without a tree is scored nevertheless, and
    holds a token that the target can embed.
    """
    for which in ("any", "fewer"):
        found = answers[which]["tokens"]
        assert found == answers["plain"]["tokens"][: len(found)]
    assert answers["fewer"]["eager growth"] == []
    assert answers["fewer"]["graphs"]["DraftGraphs"] > 2
    assert answers["least token"] >= 0


@pytest.mark.parametrize(("which", "plain"), [("joining", "plain"), ("long", "plain long")])
def test_requests_join_and_are_aborted(which, plain, answers):
    """Prompts are read, and trees grow, from graphs beside trees and prompts."""
    tokens = answers[plain]["tokens"]
    assert answers[which]["tokens"] == tokens[:ABORTED] + tokens[ABORTED + 1 :]
    assert answers[which]["counts"]["tokens_per_tree"] > 1.3
    assert answers[which]["eager reads"] == answers[which]["eager growth"] == []


def test_graphs_of_steps_that_read_prompts(answers):
    """Rows of padding are at most as many as those of the next size; the smallest has 64.

    Bounds count what outcomes might bring: up to a path of each request.
    """
    rows = answers["long"]["read rows"]
    assert max(needed for needed, _ in rows) > 256
    assert all(captured < max(2 * (needed + 4 * 4), 65) for needed, captured in rows)
    modes = answers["joining"]["modes"]  # of the target
    assert set(modes) == {"FULL", "FULL beside prompts"}
    assert modes["FULL beside prompts"] > 1


def test_preemption_and_prompts_in_chunks_beside_trees_at_the_end_of_the_budget(answers):
    """A fourth request's nodes would not fit into a pass of the draft: it gets no tree.

    FlashAttention reads contexts in every step with trees, and vLLM's attention no row of a tree,
    not even beside prompts (the target has one layer).
    """
    found, rows = answers["pressed"], answers["pressed"]["rows"]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert found["counts"]["preemptions"] > 0
    assert found["counts"]["tokens_per_tree"] > 1.3
    assert found["eager reads"] == found["eager growth"] == []
    assert found["over contexts"] >= found["graphs"]["TreeGraphManager"] > 3
    assert rows["beside trees"] > 50
    assert found["attended rows"] == rows["beside trees"] + rows["alone"]


# -- Longer prompts beside trees: from full graphs, too --------------------------------------


# Longer than a segment has rows, and than the budget leaves beside trees. The sixth begins like
# the second, and is of few rows over a context.
LONGER = [30, 300, 9, 470, 57, 260, 64, 33]
SHARED = 240


def run_mixed(models: str) -> dict[str, Any]:
    target, draft = save_related_pair(Path(models))
    requests = random_prompts(LONGER)
    requests[5]["prompt_token_ids"][:SHARED] = requests[1]["prompt_token_ids"][:SHARED]
    params = greedy_and_seeded(len(LONGER), 12)
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
    """Whether the last step of a prompt was mixed: as it is, and for a lower limit."""
    from sequoia_vllm.engine.v2 import runner_gpu

    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    found = []
    for limit in (30 * 30, 30 * 30 - 1):
        with patched(runner_gpu, "_MOST_READ", limit):
            assert llm.reset_prefix_cache()
            llm.generate(requests[:1], one, use_tqdm=False)
            found.append(runner_of(llm).cudagraph_manager.is_mixed)
    return found


mixed = called_once(call_on_gpu, run_mixed)


@pytest.mark.sharded
@pytest.mark.parametrize("which", ["arriving", "pressed"])
def test_tokens_are_those_of_plain_vllm_from_full_graphs(which, mixed):
    """Beside prompts, too, in chunks of up to 512 rows, and where trees are cut."""
    plain, found = mixed["plain"], mixed[which]
    assert found["tokens"] == plain[:ABORTED] + plain[ABORTED + 1 :]
    assert found["counts"]["tokens_per_tree"] > 1.3
    assert set(found["modes"]) == {"FULL", "FULL beside prompts"}
    assert found["modes"]["FULL beside prompts"] > 3


@pytest.mark.sharded
def test_contexts_of_others_short_memory_and_long_prompts(mixed):
    """Long prompts stay with vLLM's attention."""
    assert mixed["hits"] >= SHARED - 16
    assert mixed["pressed"]["counts"]["preemptions"] > 0
    assert mixed["long"] == [True, False]
