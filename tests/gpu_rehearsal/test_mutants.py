"""Mistakes that only CUDA graphs turn into wrong drafts are found by the rehearsal.

Output stays the target's whatever is drafted, so equal tokens alone would pass them. And what the
rehearsal rests on of its graphs, where no mistake shows it.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from sequoia_vllm.engine.common.patched import patched
from tests.support.engines import sequoia
from tests.support.generating import random_prompts, save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.rehearsing import generate_with_trees, rehearsing

pytestmark = pytest.mark.slow


# Each takes the method in whose place it is.


def takes_positions_from_the_host(grow: Any, growth: Any, num_reqs: int, *args: Any) -> None:
    known = getattr(growth._batch, "known_roots", [0] * len(growth._batch.roots))
    growth._batch.roots.copy_(torch.tensor(known, dtype=torch.int32))
    grow(growth, num_reqs, *args)


def notes_positions(begin: Any, batch: Any, *args: Any, **named: Any) -> None:
    begin(batch, *args, **named)
    batch.known_roots = batch.roots.tolist()


def moves_its_buffers(begin: Any, batch: Any, *args: Any, **named: Any) -> None:
    for name in ("starts", "counts", "roots"):
        setattr(batch, name, getattr(batch, name).clone())
    begin(batch, *args, **named)


def with_mistake(owner: Any, name: str, mistake: Any) -> Any:
    original = getattr(owner, name)
    return patched(owner, name, lambda *given, **named: mistake(original, *given, **named))


def run(models: str) -> dict[str, Any]:
    from sequoia_vllm.drafting.draft_batch import DraftBatch
    from sequoia_vllm.drafting.growth import TreeGrowth

    target, _ = save_related_pair(Path(models))
    return {
        "unchanged": counts(target),
        "host value": counts(
            target,
            with_mistake(TreeGrowth, "grow", takes_positions_from_the_host),
            with_mistake(DraftBatch, "begin", notes_positions),
        ),
        "moved buffer": counts(target, with_mistake(DraftBatch, "begin", moves_its_buffers)),
    }


def counts(target: str, *mistakes: Any) -> dict[str, Any]:
    """Children offered and accepted, of an engine that is made and run with these mistakes."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    with ExitStack() as stack:
        for mistake in mistakes:
            stack.enter_context(mistake)
        config = sequoia(size=4, depth=2, draft=target)
        with rehearsing(config, model=target, max_num_seqs=1) as llm:
            found = generate_with_trees(llm, random_prompts([20]), params)
    return {
        "offered": sum(row[0] for row in found["counts"]["offered"]),
        "accepted": sum(row[0] for row in found["counts"]["accepted"]),
        "replayed": found["graphs"].get("DraftGraphs", 0),
    }


@pytest.mark.engine
@pytest.mark.sharded
def test_what_a_graph_froze_shows_in_rejected_drafts(tmp_path):
    """All that the target drafts itself is accepted."""
    answers = call_on_gpu(run, tmp_path, models=str(tmp_path))
    unchanged = answers["unchanged"]
    assert unchanged["accepted"] == unchanged["offered"] >= 8
    for name in ("unchanged", "host value", "moved buffer"):
        assert answers[name]["replayed"] >= 4, name
    for mistake in ("host value", "moved buffer"):
        assert answers[mistake]["accepted"] < answers[mistake]["offered"], mistake


# -- The stand-in -------------------------------------------------------------------------------


def check_all() -> None:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert current_platform.is_cuda()
    results_are_destroyed_by_other_graphs_of_the_pool()
    memory_that_nothing_filled_is_poison()
    waiting_for_the_device_is_refused()
    rows_that_write_one_slot_are_refused()


def _captured(work: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool="a pool"):
        work()
    return graph


def _raises(work: Any, text: str) -> None:
    from gpu_stand_in.graphs import CaptureError

    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=text), torch.cuda.graph(graph):
        work()


def results_are_destroyed_by_other_graphs_of_the_pool() -> None:
    kept = []
    first = _captured(lambda: kept.append(torch.ones(3) + 1))
    second = _captured(lambda: torch.ones(3) + 5)
    assert kept[0].isnan().all()  # capturing computes nothing
    first.replay()
    assert kept[0].tolist() == [2.0] * 3
    second.replay()
    assert kept[0].isnan().all()


def memory_that_nothing_filled_is_poison() -> None:
    result, integers = torch.zeros(3), torch.zeros(3, dtype=torch.int32)

    def copy_empty() -> None:
        result.copy_(torch.empty(3))
        integers.copy_(torch.empty(3, dtype=torch.int32))

    _captured(copy_empty).replay()
    assert result.isnan().all()
    assert integers.tolist() == [-77] * 3


def waiting_for_the_device_is_refused() -> None:
    values = torch.arange(4)
    _raises(lambda: values[0].item(), "_local_scalar_dense")
    _raises(lambda: int(values.sum()), "not permitted when stream is capturing: .*_local_scalar")
    _raises(lambda: bool(values[0]), "")
    _raises(lambda: values.nonzero(), "nonzero")
    _raises(lambda: values[values > 1], "")
    _raises(lambda: values.masked_select(values > 1), "masked_select")
    _raises(torch.cuda.synchronize, "cuda.synchronize")
    _raises(lambda: torch.cuda.Event().query(), "Event.query")
    _raises(lambda: torch.cuda.mem_get_info(), "free memory")


def rows_that_write_one_slot_are_refused() -> None:
    from gpu_stand_in.flash_attention import reshape_and_cache_flash

    rows, caches, slots = torch.ones(2, 1, 4), torch.zeros(2, 2, 16, 1, 4), torch.tensor([17, -1])

    def write() -> None:
        reshape_and_cache_flash(rows, rows, *caches, slots, "auto", rows[0], rows[0])

    graph = _captured(write)
    graph.replay()
    assert caches.sum() == 2 * 4
    slots.fill_(17)
    for step in (write, graph.replay):
        with pytest.raises(AssertionError, match="two rows write the same slot"):
            step()


def test_stand_in(tmp_path):
    call_on_gpu(check_all, tmp_path, timeout=120)
