"""The measuring tools on the GPU engine: the program for half an hour with a GPU, from its first
to its last line, with `bench` in it, `tune` and `benchmarks.gpu.kinds`.
"""

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import kinds
from benchmarks.gpu.items import ITEMS, KERNELS, RIVALS
from benchmarks.gpu.results import FILE, Results
from benchmarks.gpu.sizes import TINY
from benchmarks.gpu.stages import make_rivals
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.step_profile import Profile
from tests.support.generating import save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.memory_checks import VARIABLE
from tests.support.models import save_word_tokenizer
from tests.support.train_drafter import script_modules

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

# `tests/gpu_check` runs the kernels' check.
REHEARSED = [item for item in ITEMS if item.name != KERNELS and item.is_tiny]
# What vLLM captures the chains of `RIVALS` with.
CHAIN_GRAPHS = {"rival": "SpeculatorCudaGraphManager", "rival-dflash": "DFlashCudaGraphManager"}
WITH_ENGINES = [item.name for item in REHEARSED if item.needs_gpus == 1 and item.measure != RIVALS]


def run_all(folder: str, names: list[str]) -> dict[str, Any]:
    from benchmarks.gpu import command

    os.environ[VARIABLE] = "0"  # other tests check the kernels' memory
    arguments = ["--tiny", "--output", folder, "--items", ",".join(names)]
    found: dict[str, Any] = {"folder": folder}
    for turn in ("first", "second"):
        with redirect_stdout(io.StringIO()) as printed:
            # Forks: the processes need not import vLLM again.
            found[turn] = command.main(arguments, start_method="fork")
        print(printed.getvalue(), file=sys.stderr)
        found[f"{turn} table"] = printed.getvalue()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpu_run")
    return call_on_gpu(run_all, folder, folder=str(folder / "out"), names=WITH_ENGINES)


@pytest.fixture(scope="module")
def results(found: dict[str, Any]) -> Results:
    return Results(Path(found["folder"]) / FILE)


def test_every_item_measures_all_of_its_parts(results, found):
    errors = {name: item.errors for name, item in results.items.items() if item.errors}
    assert not errors, errors
    assert found["first"] == found["second"] == 0
    assert all(results.of(name).state == "done" for name in WITH_ENGINES)
    assert "ERROR" not in found["first table"]
    first, second = (
        [line for line in found[f"{turn} table"].splitlines() if not line.startswith("machine")]
        for turn in ("first", "second")
    )
    assert first == second
    assert all(f"\n{name}: " in found["second table"] for name in WITH_ENGINES[1:])


def test_steps_are_timed_at_every_batch_size_and_number_of_drafts(results):
    trees, plain = results.of("trees-8b-eagle3").parts, results.of("plain-8b").parts
    for batch in TINY.batches:
        for drafts in TINY.drafts:
            found = trees[f"batch {batch}, {drafts} drafts"]
            assert found["steps"] > 1
            assert found["target_ms"] > 0
            assert (found["passes"] > 0) is (drafts > 0)
            assert {r["most"] for r in found["records"] if r["decoding"]} >= {drafts + 1}
        assert plain[f"batch {batch}, 0 drafts"]["drafting_ms"] == 0
    mixed = trees[f"prompts, {TINY.drafts[-1]} drafts"]
    assert mixed["mixed"]["steps"] > 1
    assert mixed["mixed"]["drafting_ms"] > 0
    assert trees[f"kernels, {TINY.drafts[-1]} drafts"]["kernels"]
    assert len(trees["trees"]["parents"]) == TINY.drafts[-1] + 1
    longest = results.of("flash-8b-eagle3").parts["batch 2, 3 drafts, context 40"]
    assert longest["context"] > 40


def test_drafts_follow_limits_while_requests_arrive(results):
    arrivals = results.of("arrivals-8b-eagle3").parts
    for drafts in TINY.some_drafts:
        found = arrivals[f"20 requests/s, {drafts} drafts"]
        assert str(drafts) in found["steps_by_drafts_of_the_second_half"]
        assert found["tokens_per_second"] > 0
    assert "20 requests/s, adapting" in arrivals
    assert "20 requests/s, plain" in results.of("plain-8b").parts


def test_monitors_are_read(results):
    watched = results.of("monitors-8b-eagle3").parts
    assert watched["aborted"]["waits"] == watched["aborted"]["compilations"] == 0


def test_a_profile_for_the_library_comes_of_it(results):
    profile = Profile.load(results.file.with_name("profile-8b-eagle3.json"))
    assert (profile.target, profile.head.kind) == ("meta-llama/Llama-3.1-8B", "eagle3")
    assert profile.provenance["commit"] == results.of("machine").parts["machine"]["commit"]
    assert "made-up weights" in profile.provenance["measured_with"]
    cost = CostModel(profile)
    assert cost.max_tokens(TINY.batches[-1]) == TINY.drafts[-1] + 1
    assert cost.target_seconds(1, 1) > 0


def test_two_gpus_are_timed(tmp_path):
    [name] = [item.name for item in REHEARSED if item.needs_gpus > 1]
    found = call_on_gpu(run_all, tmp_path, folder=str(tmp_path / "out"), names=[name])
    item = Results(tmp_path / "out" / FILE).of(name)
    assert (found["first"], item.state, item.errors) == (0, "done", {})
    assert item.parts[f"kernels, {TINY.drafts[-1]} drafts"]["kernels"]


@pytest.mark.parametrize("name", CHAIN_GRAPHS)
def test_heads_are_compared_in_trees_and_in_vllms_chain(tmp_path, name, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("GPU_STAND_IN_REPORT", str(tmp_path / "graphs"))
    with script_modules():  # what trains does not run beside the stand-in
        make_rivals(out, "eagle3" if name == "rival" else "dflash", tiny=True)
    found = call_on_gpu(run_all, tmp_path, folder=str(out), names=[name])
    item = Results(out / FILE).of(name)
    assert (found["first"], item.state, item.errors) == (0, "done", {})
    greedy, sampled = item.parts["bench"]["lines"]
    names = ["plain vLLM", "chain of 3, probabilistic, block", "Sequoia 6x2"]
    assert [row["method"] for row in greedy["results"]] == names
    assert greedy["greedy"]["identical"] == greedy["greedy"]["compared"] > 0
    splits = [row["split"] for row in greedy["results"]]
    assert all(split["target"] > 0 for split in splits)
    assert all(split["draft"] > 0 for split in splits[1:])
    assert {row["temperature"] for row in sampled["results"]} == {0.6}
    replayed = [json.loads(file.read_text())["replayed"] for file in tmp_path.glob("graphs.*")]
    [chain] = [graphs for graphs in replayed if CHAIN_GRAPHS[name] in graphs]
    assert chain[CHAIN_GRAPHS[name]] >= chain["ModelCudaGraphManager"] > 16
    if name == "rival":
        assert [line["method"] for line in item.parts["arrivals"]["lines"]] == names
    else:  # its head has learned for longer than a second
        _, chain, tree = greedy["results"]
        assert min(chain["tokens_per_step"], tree["tokens_per_step"]) > 1


# -- `tune` and `kinds` -------------------------------------------------------------------------


def time_pair(models: str) -> dict[str, Any]:
    from sequoia_vllm.calibration.measure_profile import ProfileSettings, measure_profile
    from sequoia_vllm.measuring.engines import EngineSpec

    target, draft = save_related_pair(Path(models))
    for model in (target, draft):
        save_word_tokenizer(Path(model))
    pair = EngineSpec(target, draft, dtype="float32", kv_cache_gib=0.02)
    settings = ProfileSettings(
        pair, batch_sizes=(1,), tokens=(1, 4), contexts=(32,), max_tokens=12, rounds=1
    )
    return measure_profile(settings).to_dict()


def test_tune_times_the_parts_of_steps(tmp_path):
    profile = call_on_gpu(time_pair, tmp_path, models=str(tmp_path))
    [target], [draft] = (profile[name] for name in ("target_forward", "draft_level"))
    assert target["tokens"] == [1, 4]
    assert min(target["seconds"] + draft["seconds"]) > 0


def compare(kind: str, folder: str) -> dict[str, Any]:
    kinds.TOKENS = 8
    return kinds.compare_kind(kind, Path(folder))


@pytest.mark.parametrize("kind", ["draft-float32", "lookup-float32", "gemma4-float32"])
def test_kinds_give_plain_vllms_tokens(kind, tmp_path):
    found = call_on_gpu(compare, tmp_path, kind=kind, folder=str(tmp_path))
    assert all(found["greedy"] + found["seeded"] + found["alone"])
    assert found["accepted_tokens"] > 0
    assert max(found["worst_gap"]) == 0
