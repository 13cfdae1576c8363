"""Requests that join, end, are aborted and preempted, on the GPU engine under its graphs."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sequoia_vllm.engine.common.patched import patched
from tests.support.calling import called_once
from tests.support.engines import runner_of, sequoia
from tests.support.generating import (
    completions,
    greedy_and_seeded,
    random_prompts,
    save_related_pair,
)
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import (
    counting_eager_growth,
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
    from gpu_stand_in import flash_attention

    target, draft = save_related_pair(Path(models))
    requests, long = random_prompts(LENGTHS), random_prompts(LONG)
    options = {"model": target, "max_num_seqs": 4}
    with rehearsing(None, **options, max_model_len=MAX_LEN) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, requests, params())}
        answers["plain long"] = generate(llm, long, params(LONG))
    tiers = sequoia(
        size=8, depth=3, draft=draft, num_speculative_tokens_per_batch_size=TIERS, adapt=True
    )
    with rehearsing(
        tiers, **options, max_model_len=MAX_LEN, attention_backend="TRITON_ATTN"
    ) as llm:
        scheduler_of(llm).end_adaptation()  # decided on below
        answers["tiers"] = generate_with_trees(llm, requests, params())
        answers["any"] = decide_often(llm, requests, most=[7] * 5)
        scheduled = scheduler_of(llm).dynamic_sd_lookup
        answers["fewer"] = decide_often(llm, requests[:3], scheduled)  # of four, nobody drafts
        answers["joining"] = join_and_abort(llm, requests, params(), ABORTED)
        answers["long"] = join_and_abort(llm, long, params(LONG), ABORTED)
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
        patched(runner_gpu, "_LONGEST", 0),  # no graphs beside prompts: our kernel has their rows
        rehearsing(
            wide, **options, max_model_len=80, num_gpu_blocks_override=8, max_num_batched_tokens=26,
        ) as llm,
    ):  # fmt: skip
        flash_attention.causal_rows.clear()
        with counting_rows(llm) as rows:
            answers["pressed"] = generate_with_trees(llm, requests, params())
        (cache,) = runner_of(llm)._target_caches.values()
        answers["pressed"] |= {
            "rows": dict(rows), "attended rows": flash_attention.causal_rows[cache.data_ptr()]
        }  # fmt: skip
    answers["pressed"]["over contexts"] = flash_attention.attended[False]
    return answers


@contextmanager
def counting_rows(llm: Any) -> Iterator[Counter[str]]:
    """Rows that are scheduled within the block: of trees, and others in steps with trees or not."""
    original, rows = scheduler_of(llm).schedule, Counter()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        drafts = output.scheduled_spec_decode_tokens
        for request, scheduled in output.num_scheduled_tokens.items():
            beside = "beside trees" if drafts else "alone"
            rows["of trees" if drafts.get(request) else beside] += scheduled
        return output

    with patched(scheduler_of(llm), "schedule", schedule):
        yield rows


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def decide_often(llm: Any, requests: list[Any], most: list[int]) -> dict[str, Any]:
    """Decides like an engine that adapts: other numbers of drafts, bounded by batch size."""
    from gpu_stand_in import graphs

    engine, done = llm.llm_engine, {}
    decisions = itertools.chain.from_iterable([drafts] * 3 for drafts in itertools.cycle(DECIDED))
    lookup, most = scheduler_of(llm).dynamic_sd_lookup, list(most)
    configured = list(lookup)
    for request in zip(map(str, range(len(requests))), requests, params(), strict=False):
        engine.add_request(*request)
    before = graphs.report()
    with counting_eager_growth() as eager:
        while engine.has_unfinished_requests():
            drafts = next(decisions)
            lookup[:] = [min(drafts, bound) for bound in most]
            done |= {output.request_id: output for output in engine.step() if output.finished}
    lookup[:] = configured
    return {
        "tokens": completions([done[str(index)] for index in range(len(requests))]),
        "graphs": since(before)["replayed"],
        "eager growth": eager,
    }


answers = called_once(call_on_gpu, run)


def test_tiers_of_a_schedule_are_replayed(answers):
    found = answers["tiers"]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert found["eager growth"] == []
    assert found["graphs"]["DraftGraphs"] > 3
    assert found["counts"]["tokens_per_tree"] > 1.3


@pytest.mark.parametrize("which", ["any", "fewer"])
def test_numbers_of_drafts_may_change_in_any_step(which, answers):
    found = answers[which]["tokens"]
    assert found == answers["plain"]["tokens"][: len(found)]


def test_fewer_drafts_than_the_schedules_have_graphs_too(answers):
    """One draft is in no tier, and three are at other batch sizes only."""
    assert answers["fewer"]["eager growth"] == []
    assert answers["fewer"]["graphs"]["DraftGraphs"] > 2


def test_rows_without_a_tree_hold_tokens_that_the_target_can_embed(answers):
    """vLLM marks what it did not ask for with -1; a row without a tree is scored nevertheless."""
    assert answers["least token"] >= 0


@pytest.mark.parametrize(("which", "plain"), [("joining", "plain"), ("long", "plain long")])
def test_requests_join_and_are_aborted(which, plain, answers):
    tokens = answers[plain]["tokens"]
    assert answers[which]["tokens"] == tokens[:ABORTED] + tokens[ABORTED + 1 :]
    assert answers[which]["counts"]["tokens_per_tree"] > 1.3


def test_preemption_and_prompts_in_chunks_beside_trees_at_the_end_of_the_budget(answers):
    """A fourth request's nodes would not fit into a pass of the draft: it gets no tree."""
    found = answers["pressed"]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert found["counts"]["preemptions"] > 0
    assert found["counts"]["tokens_per_tree"] > 1.3


@pytest.mark.parametrize("which", ["joining", "long", "pressed"])
def test_prompts_are_read_in_graphs_beside_trees(which, answers):
    assert answers[which]["eager reads"] == []


def test_a_graphs_rows_of_padding_are_at_most_as_many_as_those_of_the_next_size(answers):
    """The smallest has 64. Bounds count what outcomes might bring: up to a path of each request."""
    rows = answers["long"]["read rows"]
    assert max(needed for needed, _ in rows) > 256
    assert all(captured < max(2 * (needed + 4 * 4), 65) for needed, captured in rows)


@pytest.mark.parametrize("which", ["joining", "long", "pressed"])
def test_trees_grow_from_graphs_beside_prompts(which, answers):
    """Whether requests join, are aborted or are preempted, and prompts come in chunks."""
    assert answers[which]["eager growth"] == []


def test_the_target_runs_steps_with_trees_in_full_graphs(answers):
    """Also where a step reads prompts."""
    modes = answers["joining"]["modes"]
    assert set(modes) == {"FULL", "FULL beside prompts"}
    assert modes["FULL beside prompts"] > 1


def test_vllms_attention_reads_no_rows_of_trees(answers):
    """Not in steps that read prompts beside them, either (the target has one layer)."""
    rows = answers["pressed"]["rows"]
    assert rows["beside trees"] > 50
    assert answers["pressed"]["attended rows"] == rows["beside trees"] + rows["alone"]


def test_flash_attention_reads_contexts_where_it_is_told_to(answers):
    """In every step with trees, replayed ones included (the target has one layer)."""
    found = answers["pressed"]
    assert found["graphs"]["TreeGraphManager"] > 3
    assert found["over contexts"] >= found["graphs"]["TreeGraphManager"]
