"""Nothing is written past a request's blocks, though few are reserved where little is drafted."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.block_heads import save_dflash2
from tests.support.calling import called_once
from tests.support.engines import runner_of, sequoia
from tests.support.generating import (
    completions,
    counted,
    greedy_and_seeded,
    random_prompts,
    save_related_pair,
)
from tests.support.heads import save_dflash
from tests.support.models import save_llama
from tests.support.on_gpu import call_on_gpu
from tests.support.own_blocks import only_own_blocks
from tests.support.rehearsing import rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

DEPTH = 4  # of heads' trees
# Trees that take more than a block or two alone, and at four requests hardly anything.
TIERS = [[1, 1, 39], [2, 2, 17], [3, 3, 3], [4, 4, 1]]
LENGTHS = [30, 21, 9, 17, 40, 5, 12]
ABORTED = 2
TOKENS = [50, 7, 20, 33, 11, 40, 16]
DECIDED = [0, 39, 1, 17, 3]  # each for two steps, where the schedule has as many
LIMITS = {"max_num_seqs": 4, "max_model_len": 128}


def params() -> list[Any]:
    """Requests that end one after another: batches shrink by one."""
    found = greedy_and_seeded(len(LENGTHS), 1)
    for one, tokens in zip(found, TOKENS, strict=True):
        one.max_tokens = tokens
    found[3].extra_args = {"sequoia_max_drafts": 2}
    return found


def run(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, of trees, and of trees with too few slots."""
    target, draft = save_related_pair(Path(models))
    requests = random_prompts(LENGTHS)
    tiers = {"num_speculative_tokens_per_batch_size": TIERS, "adapt": True}
    trees = sequoia(size=40, depth=5, draft=draft, **tiers)
    with rehearsing(None, model=target, **LIMITS) as llm:
        answers: dict[str, Any] = {"plain": serve(llm, requests)}
    with only_own_blocks():
        with rehearsing(trees, model=target, **LIMITS) as llm:
            answers["trees"] = serve(llm, requests)
            answers["decided"] = serve(llm, requests, DECIDED)
        # Blocks for two or three requests; prompts in pieces.
        with rehearsing(
            trees, model=target, num_gpu_blocks_override=11, max_num_batched_tokens=64, **LIMITS
        ) as llm:
            answers["pressed"] = serve(llm, requests)
        with too_few_slots(), rehearsing(trees, model=target, **LIMITS) as llm:
            answers["mistake"] = serve(llm, requests)
    return answers


def too_few_slots() -> Any:
    """A mistake: trees are grown where nothing is reserved for them."""
    from sequoia_vllm.engine.common.patched import patched
    from sequoia_vllm.engine.core.scheduling import TreeScheduling

    return patched(TreeScheduling, "_slots_for", lambda *_: 0)


def run_heads(models: str) -> dict[str, Any]:
    """Heads that draft blocks of as many levels as are drafted, and of all levels."""
    place = Path(models)
    target = str(
        save_llama(place / "target", seed=3, scale=1.5, vocab_size=6, max_position_embeddings=128)
    )
    chain = sequoia(
        num_speculative_tokens_per_batch_size=[[1, 1, DEPTH], [2, 2, 2], [3, 4, 1]],
        tree={"parents": list(range(-1, DEPTH))},
    )
    requests = random_prompts(LENGTHS[:4], vocab=6)
    with rehearsing(None, model=target, **LIMITS) as llm:
        answers: dict[str, Any] = {"plain": serve(llm, requests)}
    for name, save in (("DFlash", save_dflash), ("DFlash2", save_dflash2)):
        config = {**chain, "model": save(place / name, target)}
        with only_own_blocks(), rehearsing(config, model=target, **LIMITS) as llm:
            answers[name] = serve(llm, requests)
    return answers


def serve(llm: Any, requests: list[Any], decided: list[int] | None = None) -> dict[str, Any]:
    """One request more every third step; one is aborted.

    Returns:
        Tokens, and look-ahead slots with the number of requests that ran before each step.
    """
    engine, done = llm.llm_engine, {}
    scheduler = engine.engine_core.engine_core.scheduler
    waiting = list(zip(map(str, range(len(requests))), requests, params(), strict=False))
    steps, slots = itertools.count(), watched_slots(scheduler)
    lookup = scheduler.dynamic_sd_lookup
    if lookup is not None:
        scheduler.end_adaptation()  # decided on below
        lookup = scheduler.dynamic_sd_lookup
        configured = list(lookup)
    while waiting or engine.has_unfinished_requests():
        step = next(steps)
        if waiting and step % 3 == 0:
            engine.add_request(*waiting.pop(0))
        if step == 3 * ABORTED + 4:
            engine.abort_request([str(ABORTED)])
        if decided is not None:
            drafts = decided[step // 2 % len(decided)]
            lookup[:] = [min(drafts, most) for most in configured]
        done |= {output.request_id: output for output in engine.step() if output.finished}
    if decided is not None:
        lookup[:] = configured
    others = [str(index) for index in range(len(requests)) if index != ABORTED]
    return {
        "tokens": completions([done[name] for name in others]),
        "counts": None if lookup is None else counted(llm),
        "failed": getattr(runner_of(llm), "draft_has_failed", False),
        "slots": slots,
    }


def watched_slots(scheduler: Any) -> list[list[int]]:
    """From now on: requests that ran before a step, and look-ahead slots of each it schedules."""
    manager, found = scheduler.kv_cache_manager, []
    original = type(manager).allocate_slots

    def allocate_slots(*args: Any, num_lookahead_tokens: int = 0, **kwargs: Any) -> Any:
        found.append([len(scheduler.running), num_lookahead_tokens])
        return original(manager, *args, num_lookahead_tokens=num_lookahead_tokens, **kwargs)

    manager.allocate_slots = allocate_slots
    return found


answers = called_once(call_on_gpu, run)


@pytest.mark.parametrize("which", ["trees", "decided", "pressed"])
def test_nothing_is_written_past_a_requests_blocks(which, answers):
    found = answers[which]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert not found["failed"]
    assert found["counts"]["tokens_per_tree"] > 1.3


def test_requests_are_preempted_where_blocks_are_few(answers):
    assert answers["pressed"]["counts"]["preemptions"] > 0


def test_batches_reserve_slots_for_their_own_drafts(answers):
    by_running = {}
    for ran, slots in answers["trees"]["slots"]:
        by_running.setdefault(ran, set()).add(slots)
    assert max(by_running[1]) == 39
    assert by_running[4] == {1}


def test_what_is_written_elsewhere_would_be_found(answers):
    """The draft ends where the stand-in refuses; see `only_own_blocks`."""
    assert answers["mistake"]["failed"]


of_heads = called_once(call_on_gpu, run_heads)


@pytest.mark.parametrize("name", ["DFlash", "DFlash2"])
def test_blocks_of_a_head_have_their_slots(name, of_heads):
    """A root and a mask for each level; of DFlash2 for all levels, when one is drafted, too."""
    found = of_heads[name]
    assert found["tokens"] == of_heads["plain"]["tokens"]
    assert not found["failed"]
    assert found["counts"]["drafts"] > 10
    assert {slots for ran, slots in found["slots"] if ran > 2} == {DEPTH + 1}
