"""What the GPU engine's limits allow: slots of few blocks, requests at once, logits of a start.

Nothing is written past a request's blocks, though few are reserved where little is drafted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from sequoia_vllm.engine.common.patched import patched
from tests.support.block_heads import save_dflash2
from tests.support.calling import called_once
from tests.support.engines import noting, runner_of, scheduler_of, sequoia
from tests.support.generating import (
    VOCAB,
    counted,
    greedy_and_seeded,
    joined,
    random_prompts,
    save_related_pair,
)
from tests.support.heads import save_dflash
from tests.support.interpreted import call_on_gpu
from tests.support.models import save_llama
from tests.support.rehearsing import generate, recording_versions, rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

DEPTH = 4  # of heads' trees
# Trees that take more than a block or two alone, and at four requests hardly anything.
TIERS = [[1, 1, 39], [2, 2, 17], [3, 3, 3], [4, 4, 1]]
LENGTHS = [30, 21, 9, 17, 40, 5, 12]
ABORTED = 2
TOKENS = [50, 7, 20, 33, 11, 40, 16]
DECIDED = [0, 39, 1, 17, 3]  # each for two steps, where the schedule has as many
LIMITS = {"max_num_seqs": 4, "max_model_len": 128}


OUTSIDE = 1 << 20  # a block that no cache of the tests has


@contextmanager
def only_own_blocks() -> Iterator[None]:
    """Within the block, every step's tables lead outside the cache behind its requests' blocks.

    vLLM leaves there what earlier requests had: what is written past a request's blocks lands in
    another's, and nobody sees it. Here the stand-in's cache update refuses it.
    """
    from vllm.v1.worker.gpu.block_table import BlockTables

    original = BlockTables.gather_block_tables

    def gather_block_tables(self: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        for group, table in enumerate(self.block_tables):
            for request in requests.tolist():
                table.gpu[request, int(self.num_blocks.np[group, request]) :] = OUTSIDE
            # Rows beyond the batch are padding, which is read and looked at by nobody.
            self.input_block_tables[group][: len(requests)].fill_(OUTSIDE)
        return original(self, requests, *args, **kwargs)

    with patched(BlockTables, "gather_block_tables", gather_block_tables):
        yield


def params() -> list[Any]:
    """Requests that end one after another: batches shrink by one."""
    found = greedy_and_seeded(len(LENGTHS), TOKENS)
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
    scheduler = scheduler_of(llm)
    slots = watched_slots(scheduler)
    if scheduler.dynamic_sd_lookup is not None:
        scheduler.end_adaptation()  # decided on below
    lookup = scheduler.dynamic_sd_lookup
    configured = [] if lookup is None else list(lookup)

    def decide(step: int) -> None:
        if decided is not None:
            drafts = decided[step // 2 % len(decided)]
            lookup[:] = [min(drafts, most) for most in configured]

    tokens = joined(llm, requests, params()[: len(requests)], ABORTED, 3, decide)
    if decided is not None:
        lookup[:] = configured
    return {
        "tokens": tokens,
        "counts": None if lookup is None else counted(llm),
        "failed": getattr(runner_of(llm).speculator, "has_failed", False),
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
    """Blocks are few where requests are preempted. What is written elsewhere would be found.

    The draft ends where the stand-in refuses; see `only_own_blocks`.
    """
    found = answers[which]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert not found["failed"]
    assert found["counts"]["tokens_per_tree"] > 1.3
    assert found["counts"]["preemptions"] > 0 or which != "pressed"
    assert answers["mistake"]["failed"]


def test_batches_reserve_slots_for_their_own_drafts(answers):
    by_running = {}
    for ran, slots in answers["trees"]["slots"]:
        by_running.setdefault(ran, set()).add(slots)
    assert max(by_running[1]) == 39
    assert by_running[4] == {1}


of_heads = called_once(call_on_gpu, run_heads)


@pytest.mark.parametrize("name", ["DFlash", "DFlash2"])
def test_blocks_of_a_head_have_their_slots(name, of_heads):
    """A root and a mask for each level; of DFlash2 for all levels, when one is drafted, too."""
    found = of_heads[name]
    assert found["tokens"] == of_heads["plain"]["tokens"]
    assert not found["failed"]
    assert found["counts"]["drafts"] > 10
    assert {slots for ran, slots in found["slots"] if ran > 2} == {DEPTH + 1}


# -- Requests at once, and logits and kernels of a start ------------------------------------------


REQUESTS, NODES = 6, 8


def run_many(models: str) -> dict[str, Any]:
    """Six requests with a DFlash head, where four trees' nodes fill a step."""
    target = str(save_llama(Path(models) / "target", seed=3, vocab_size=6))
    config = sequoia(
        size=NODES,
        depth=3,
        draft=save_dflash(Path(models) / "head", target),
        num_speculative_tokens_per_batch_size=[[1, 1, NODES - 1], [2, REQUESTS, 0]],
    )
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    limits = {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 4 * NODES, "max_model_len": 64}
    with rehearsing(config, as_users_start=True, model=target, **limits) as llm:
        scheduler, requests = scheduler_of(llm), random_prompts([3] * REQUESTS, vocab=6)
        with noting(
            scheduler, "schedule", lambda step: len(step.num_scheduled_tokens), of_result=True
        ) as together:
            generate(llm, requests, params)
        return {"together": max(together), "limit": scheduler.scheduler_config.max_num_active_seqs}


def start(models: str) -> dict[str, Any]:
    """An engine with many request slots, of which a few may have whole trees.

    Then requests run to the longest that may be: their last trees are trimmed to any size. In
    half precision tiles of the tree attention kernel differ by it.
    """
    sizes = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 1}
    target = str(save_llama(Path(models) / "target", seed=3, **sizes))
    # With heads of another size: what it compiles is of no use to the target.
    draft = str(save_llama(Path(models) / "draft", seed=4, **sizes, head_dim=16))
    schedule = [[1, 4, NODES - 1], [5, 32, 0]]
    config = sequoia(
        size=NODES, depth=3, draft=draft, num_speculative_tokens_per_batch_size=schedule
    )
    limits = {"max_num_seqs": 32, "dtype": "float16", "max_model_len": 64}
    with (
        watching_logits() as (scored, profiled),
        recording_versions() as versions,
        rehearsing(config, as_users_start=True, model=target, **limits) as llm,
    ):
        slots = runner_of(llm).scheduler_config.max_num_seqs
        found = {"scored": list(scored), "profiled": profiled, "slots": slots}
        scored.clear()
        at_start = set(versions)
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        for lengths in ([52, 40], [57], [5, 60, 45]):
            generate(llm, random_prompts(lengths), params)
    return {**found, "sizes": sorted(set(scored)), "late": sorted(versions - at_start)}


@contextmanager
def watching_logits() -> Iterator[tuple[list[int], list[int]]]:
    """Rows of the target's logits: of each step within the block, and as profiled."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # the stand-ins, without which the modules below find no GPU
    from sequoia_vllm.engine.v2.drafting import proposer
    from sequoia_vllm.engine.v2.runner import TreeRunner

    def scored_rows(runner: Any, hidden_states: Any, batch: Any, *_: Any) -> int:
        return len(batch.logits_indices)

    with (
        noting(proposer, "take_logits_memory", lambda rows, *_: rows) as profiled,
        noting(TreeRunner, "sample", scored_rows) as scored,
    ):
        yield scored, profiled


def test_a_head_that_drafts_blocks_limits_no_requests(tmp_path):
    assert call_on_gpu(run_many, tmp_path, models=str(tmp_path)) == {
        "together": REQUESTS,
        "limit": None,
    }


def test_a_start_computes_no_more_logits_than_were_profiled_and_compiles_all_kernels(tmp_path):
    found = call_on_gpu(start, tmp_path, models=str(tmp_path))
    assert max(found["profiled"]) == 4 * NODES
    assert 2 * NODES <= max(found["scored"]) <= max(found["profiled"])
    assert found["slots"] == 32
    assert {2, 3, 4, 5} <= set(found["sizes"])  # rows of one request with a trimmed tree
    assert found["late"] == []
