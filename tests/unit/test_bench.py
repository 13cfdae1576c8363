"""The bench without engines: methods, rates, the greedy check, tables and plots."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from sequoia_vllm.bench import engines, measure
from sequoia_vllm.bench.engines import Arrival, check_memory, in_this_process, part_seconds
from sequoia_vllm.bench.methods import PLAIN, SERVED, BenchError, chain, methods, sequoia
from sequoia_vllm.bench.report import (
    CHAIN_SAMPLES_WRONGLY,
    DECLINED,
    BenchModel,
    BenchReport,
    disagreement,
    plot_speeds,
    results,
    shown,
    synthetic_note,
)
from sequoia_vllm.cli import app, measuring
from sequoia_vllm.cli.bench import print_report
from sequoia_vllm.cli.measuring import draft_to_measure
from sequoia_vllm.config import OffloadSpec, SequoiaConfig
from sequoia_vllm.hardware.step_curves import StepRecord
from sequoia_vllm.measuring import provenance
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.measuring.step_recorder import StepRecorder
from sequoia_vllm.tree import TokenTree
from tests.support.commands import command, in_words
from tests.support.heads import save_mimo
from tests.support.models import DRAFT, TARGET

OWN_PROCESSES = "VLLM_ENABLE_V1_MULTIPROCESSING"


def test_methods_in_order():
    plain_, *chains, auto, sized = methods("d", ["2", "3"], ["auto", "16x4"])
    assert [method.name for method in (plain_, *chains, auto, sized)] == [
        "plain vLLM", "chain of 2", "chain of 3", "Sequoia auto", "Sequoia 16x4",
    ]  # fmt: skip
    assert plain_.speculative_config is None
    assert chains[0].speculative_config == {
        "method": "draft_model", "model": "d", "num_speculative_tokens": 2,
    }  # fmt: skip
    assert auto.speculative_config == {"method": "sequoia", "model": "d", "tree": "auto"}
    assert sized.speculative_config["tree"] == {"size": 16, "depth": 4}
    assert [x.most_drafts for x in (plain_, *chains, auto, sized)] == [0, 2, 3, 127, 15]


def test_the_default_is_what_a_server_runs(monkeypatch):
    """Of all options only the draft is given, as in ``--speculative-config sequoia``."""
    found, devices = [], []
    monkeypatch.setattr("sequoia_vllm.cli.measuring.draft_to_measure", lambda target: "known")
    monkeypatch.setattr("sequoia_vllm.cli.measuring.check_models", lambda *_: None)
    monkeypatch.setattr("sequoia_vllm.cli.bench.load_tokenizer", lambda _: SimpleNamespace())
    monkeypatch.setattr("sequoia_vllm.cli.bench.encode_prompts", lambda *_, **__: [[1]])

    def stop(settings, described, *_):
        found[:] = settings.methods
        devices.append((settings.engine.tensor_parallel_size, described["tensor_parallel_size"]))
        raise BenchError("enough")

    monkeypatch.setattr("sequoia_vllm.cli.bench.run_bench", stop)
    for options in (["--tensor-parallel-size", "2"], []):
        assert "enough" in CliRunner().invoke(app, ["bench", "--model", "t", *options]).stderr
    assert devices == [(2, 2), (1, 1)]
    assert [method.name for method in found] == [
        "plain vLLM", "chain of 1", "chain of 2", "chain of 4", "Sequoia",
    ]  # fmt: skip
    config = SequoiaConfig.parse(found[-1].speculative_config)
    assert config == SequoiaConfig.parse("sequoia").model_copy(update={"model": "known"})


def test_trees_by_file_and_by_name(tmp_path):
    path = tmp_path / "fork.json"
    TokenTree((-1, 0, 0)).save(path)
    assert sequoia("d", str(path)).name == "Sequoia fork"
    assert sequoia("d", str(path)).most_drafts == 2
    assert sequoia("d", "h200/70b-1b/shipped").most_drafts > 2
    drawn = sequoia("d", "served").speculative_config | {"retrieval": False}
    assert sequoia("d", "drawn").speculative_config == drawn
    traversed = sequoia("d", "served").speculative_config | {"verification": "traversal"}
    assert sequoia("d", "traversal").speculative_config == traversed
    assert sequoia("d", "lookup").speculative_config == {"method": "sequoia", "drafter": "lookup"}


def test_without_a_draft_chains_are_of_n_grams_and_trees_from_text():
    plain_, ngram, *trees = methods("lookup", ["4"], ["served", "drawn", "auto", "16x4"])
    assert (plain_.name, ngram.name) == ("plain vLLM", "n-gram chain of 4")
    assert ngram.speculative_config["method"] == "ngram"
    configs = [method.speculative_config for method in trees]
    assert configs[0] == {"method": "sequoia", "drafter": "lookup"}
    assert all(config["drafter"] == "lookup" and "model" not in config for config in configs)
    with pytest.raises(BenchError, match="n-gram chains draw nothing; give 4"):
        methods("lookup", ["4:probabilistic"], [])
    same = "'Sequoia' and 'Sequoia, lookup' are the same without a draft model: give one of the two"
    with pytest.raises(BenchError, match=same):
        methods("lookup", [], ["served", "lookup"])
    named = [method.name for method in methods("d", [], ["served", "lookup"])]
    assert named[1:] == ["Sequoia", "Sequoia, lookup"]


def test_the_targets_own_layer_is_drafted_with_by_its_kind():
    """vLLM finds the layer in the target, for its chains and for trees."""
    _, chain_, probable, tree = methods("mtp", ["4", "2:probabilistic"], ["served"])
    assert chain_.speculative_config == {"method": "mtp", "num_speculative_tokens": 4}
    assert probable.speculative_config == {
        "method": "mtp", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic",
    }  # fmt: skip
    assert tree.speculative_config == {"method": "sequoia", "drafter": "mtp"}


@pytest.mark.parametrize("name", ["bench", "tune"])
def test_a_layer_that_cannot_be_measured_is_refused_with_the_fix(name, tmp_path, monkeypatch):
    """The engine needs V2, and the checkpoint the layer's weights."""
    target = save_mimo(tmp_path / "target")
    asked = name, "--model", target, "--draft-model", "mtp"
    said = in_words(command(*asked, code=2).stderr)
    assert (
        "--draft-model mtp: a multi-token prediction (MTP) layer needs vLLM's Model Runner" in said
    )
    assert "measure on a GPU, or leave --draft-model out" in said
    assert draft_to_measure(target) == "lookup"  # as engines take it here
    monkeypatch.setattr(measuring, "_runs_here", lambda kind: True)
    assert draft_to_measure(target) == "mtp"
    index = Path(target, "model.safetensors.index.json")
    index.write_text('{"weight_map": {"model.norm.weight": ""}}', "utf-8")
    assert draft_to_measure(target) == "lookup"
    said = in_words(command(*asked, code=2).stderr)
    assert f"{target!r} has no multi-token prediction (MTP) layer that trees draft with" in said
    assert "leave --draft-model out, or name a draft model or a head" in said


def arrivals(*steps):
    """(seconds, tokens of each request[, whether one has all of its tokens])."""
    return [Arrival(step[0], step[1], len(step) > 2) for step in steps]


def test_steady_steps_are_after_every_first_token_until_one_has_all():
    steps = [
        (1.0, (1, 0)),  # the second prompt is still being read
        (2.0, (3, 1)), (2.5, (2, 4)), (3.5, (1, 1)),
        (5.0, (3, 1), "has all"), (9.5, (0, 1), "has all"),
    ]  # fmt: skip
    found = measure.steady_part(arrivals(*steps))
    assert found == measure.Steady([2, 4, 1, 1, 3, 1], steps=3, seconds=3.0, batch_size=2)
    assert found.tokens_per_second == 4
    assert found.tokens_per_step == 2
    assert found.step_seconds == 1


def test_short_completions_have_the_tokens_per_step_of_long_ones():
    """Though the step that completes one is likely to be a long one."""
    random = np.random.default_rng(0)
    lengths = np.array([1, 2, 3, 15])
    parts = []
    for _ in range(3000):
        steps = [(0.0, (1,))]
        while (total := sum(step[1][0] for step in steps)) < 24:
            new = int(random.choice(lengths))
            steps.append((len(steps), (new,), *(["has all"] if total + new >= 24 else [])))
        parts.append(measure.steady_part(arrivals(*steps)))
    assert measure.pooled(parts).tokens_per_step == pytest.approx(lengths.mean(), rel=0.03)


@pytest.mark.parametrize("steps", [(), ((1.0, (1,), "has all"),), ((1.0, (1,)),)])
def test_too_short_completions(steps):
    with pytest.raises(BenchError, match="--max-tokens"):
        measure.steady_part(arrivals(*steps))


@given(st.integers(1, 20), st.integers(1, 9))
def test_batches_are_full_and_hold_every_prompt(count, batch_size):
    prompts = [[number] for number in range(count)]
    found = measure.batches(prompts, batch_size)
    assert {len(batch) for batch in found} == {batch_size}
    flat = [prompt for batch in found for prompt in batch]
    assert flat[:count] == prompts
    assert len(flat) - count < batch_size


def ticking(seconds):
    return lambda self: self.tick(seconds)


class FakeRunner:
    """Calls its parts as vLLM's runner does; every one takes a tick of the clock."""

    _model_forward, _verify, _commit = ticking(10), ticking(70), ticking(30)
    propose_draft_token_ids = ticking(1000)

    def __init__(self, clock):
        self.clock = clock
        self.model = SimpleNamespace(compute_logits=lambda: self.tick(1))

    def tick(self, seconds):
        self.clock.now += seconds

    def _sample(self):
        self._verify()
        self._commit()

    def execute_model(self, scheduler_output):
        self._model_forward()
        self.model.compute_logits()
        self._sample()
        if scheduler_output.scheduled_spec_decode_tokens:
            self.propose_draft_token_ids()


class FakeRunnerV2(FakeRunner):
    """Its `sample` includes the LM head; a tree's passes are one graph."""

    def execute_model(self, scheduler_output):
        self.tick(10)

    def __init__(self, clock):
        super().__init__(clock)
        self.req_states = None
        self.device = SimpleNamespace(type="cpu")
        self.speculator = SimpleNamespace(propose=lambda: self.tick(1000), pass_widths=[3, 1])

    def sample(self):
        self.model.compute_logits()
        self.tick(100)


def step(scheduled, drafted=None):
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=drafted or {}
    )


STEADY = step({"a": 3}, {"a": [5, 6]})


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("sequoia_vllm.measuring.step_recorder.time.perf_counter", lambda: clock.now)
    return clock


def timed_worker(runner):
    worker = StepRecorder()
    worker.model_runner = runner
    worker.sequoia_record_steps()
    return worker


def parts_of(worker, batch_size):
    return part_seconds([StepRecord(**step) for step in worker.sequoia_take_steps(batch_size)])


def test_parts_of_steady_steps_only(clock):
    runner = FakeRunner(clock)
    worker = timed_worker(runner)
    for scheduled, drafted in [
        ({"a": 1, "b": 7}, {}),  # b reads its prompt
        ({"a": 3, "b": 4}, {"a": [5, 6], "b": [5, 6, 7]}),
        ({"a": 1, "b": 2}, {"b": [5]}),
        ({"a": 1}, {}),  # b has ended
    ]:
        runner.execute_model(step(scheduled, drafted))
    assert parts_of(worker, 2) == {
        "target": 22, "draft": 2000, "drawing": 0, "verify": 200, "steps": 2,
    }  # fmt: skip
    assert parts_of(worker, 2)["steps"] == 0


def test_drawing_is_told_apart_in_trees(clock):
    runner = FakeRunner(clock)
    runner.stats = "of trees"
    runner.drafter = SimpleNamespace(_forward=lambda tokens: runner.tick(900), _predict=None)

    def propose():
        runner.drafter._forward([5, 6, 7])
        runner.tick(100)

    runner.propose_draft_token_ids = propose
    worker = timed_worker(runner)
    runner.execute_model(STEADY)
    [found] = worker.sequoia_take_steps()
    assert (found["drafting"], found["drawing"], found["passes"]) == (1000, 100, [(3, 900)])
    runner.execute_model(STEADY)
    parts = parts_of(worker, 1)
    assert (parts["draft"], parts["drawing"]) == (900, 100)


def test_drawing_is_told_apart_in_chains(clock):
    runner = FakeRunner(clock)
    draft = SimpleNamespace(forward=lambda: runner.tick(200), compute_logits=lambda: runner.tick(5))
    runner.drafter = SimpleNamespace(model=draft)

    def propose():
        for _ in range(2):
            draft.forward()
            draft.compute_logits()
        runner.tick(90)

    runner.propose_draft_token_ids = propose
    worker = timed_worker(runner)
    for _ in range(2):
        runner.execute_model(STEADY)
        found = worker.sequoia_take_steps()[-1]
        assert (found["drafting"], found["drawing"]) == (500, 90)


def test_parts_of_steps_of_model_runner_v2(clock):
    runner = FakeRunnerV2(clock)
    worker = timed_worker(runner)
    for scheduled in ({"a": 7, "b": 3}, {"a": 3, "b": 3}):  # at first a reads its prompt
        runner.execute_model(step(scheduled, dict.fromkeys(scheduled, (5, 6))))
        runner.sample()
        runner.speculator.propose()
    [found] = worker.sequoia_take_steps(2)
    assert found["passes"] == [(6, 500), (2, 500)]
    assert part_seconds([StepRecord(**found)]) == {
        "target": 11, "draft": 1000, "drawing": 0, "verify": 100, "steps": 1,
    }  # fmt: skip
    assert worker.sequoia_take_steps() == []


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
def test_new_recording_ends_the_earlier_one(clock, is_v2):
    runner = FakeRunnerV2(clock) if is_v2 else FakeRunner(clock)
    worker = timed_worker(runner)
    earlier = worker._sequoia_recording
    worker.sequoia_record_steps()
    runner.execute_model(STEADY)
    if is_v2:
        runner.speculator.propose()
    [found] = worker.sequoia_take_steps()
    assert found["drafting"] == 1000
    assert earlier.take() == []
    worker._sequoia_recording.end()
    assert "execute_model" not in vars(runner)


def checked(output, gaps, dtype="bfloat16"):
    """The greedy check of one output, in which plain vLLM's is [1, 2, 3]."""
    case = measure.EngineCase(1, 0.0)
    runs = [
        measure.MethodRuns(method, None, 0, [replace(round_run(1), token_ids=[ids])])
        for method, ids in ((PLAIN, [1, 2, 3]), (chain("d", 2), output))
    ]
    settings = measure.BenchSettings(EngineSpec("t", "d"), methods=(PLAIN,), prompts=([7],))
    target = SimpleNamespace(dtype=dtype, gaps_to_best=lambda prompt, output: gaps)
    return measure.check_outputs(settings, {case: runs}, target)


@pytest.mark.parametrize(
    ("output", "gaps", "dtype", "passed", "mismatch"),
    [
        # Only half precision has near-ties.
        ([1, 2, 4], [9.0, 9.0, 0.02], "bfloat16", True, (2, 4, 3, 0.02)),
        ([1, 2, 4], [9.0, 9.0, 0.02], "float16", True, (2, 4, 3, 0.02)),
        ([1, 2, 4], [9.0, 9.0, 0.02], "float32", False, (2, 4, 3, 0.02)),
        # Another length is an error.
        ([1, 2], [0.0, 0.0], "bfloat16", False, (2, None, 3, 0.0)),
        # Nothing is judged before the difference.
        ([1, 9, 3], [3.0, 0.01, 0.02], "bfloat16", True, (1, 9, 2, 0.02)),
        ([1, 9, 3], [0.0, 0.01, 3.0], "bfloat16", False, (1, 9, 2, 3.0)),
    ],
)
def test_the_greedy_check(output, gaps, dtype, passed, mismatch):
    check = checked(output, gaps, dtype)
    assert (check.compared, check.identical, check.passed) == (2, 1, passed)
    [found] = check.mismatches
    assert found.prompt == 0
    assert (found.position, found.token, found.plain_token, found.gap) == mismatch


def round_run(rate, tokens_per_step=1.0, counters=None):
    steps = 50
    tokens = round(steps * tokens_per_step)
    return measure.RoundRun(
        steady=measure.Steady([round(tokens_per_step)] * steps, steps, tokens / rate, 1),
        token_ids=[[0] * tokens],
        texts=[""],
        parts={"target": 1.0, "draft": 0.5, "drawing": 0.1, "verify": 0.2, "steps": steps},
        counters=counters,
    )


TREE = TokenTree((-1, 0, 0, 1))
CASES = [measure.EngineCase(1, 0.0), measure.EngineCase(1, 1.0)]


def summed(chain_is_wrong=True):
    counters = {"steps": 50, "tree_steps": 50, "seconds": {"target": 1.0, "verify": 0.5}}
    runs = [
        (PLAIN, None, 0, [round_run(10), round_run(8), round_run(9)]),
        (chain("d", 2), None, 2, [round_run(15, 2), round_run(16, 2), round_run(9, 2)]),
        (chain("d", 3), None, 3, [round_run(13, 2)] * 3),
        (sequoia("d", "auto"), None, 0, [round_run(9)] * 3),
        (sequoia("d", "4x2"), TREE, 3, [round_run(20, 3, counters)] * 3),
    ]
    of_methods = [measure.MethodRuns(*own) for own in runs]
    found = measure.BenchRuns("bfloat16", dict.fromkeys(CASES, of_methods))
    return results(found, chain_is_wrong=chain_is_wrong)


def test_speedups_are_paired_by_round_and_the_best_chain_is_marked_in_each_case():
    found = summed()
    plain_, chain2 = found[:2]
    assert chain2.tokens_per_second.median == 15
    assert (chain2.speedup.low, chain2.speedup.median, chain2.speedup.high) == (1.0, 1.5, 2.0)
    assert plain_.speedup.low == plain_.speedup.high == 1
    assert [result.best_chain for result in found] == [False, True, False, False, False] * 2
    names = [result.method for result in shown(found)]
    assert names[:3] == ["plain vLLM", "chain of 2", "Sequoia auto"]


def test_split_adds_up_to_the_step():
    for result in summed():
        parts = result.split
        total = parts.target + parts.draft + parts.drawing + parts.verify + parts.other
        assert total == pytest.approx(result.step_seconds)
        assert parts.target == pytest.approx(0.02)
        assert parts.outside == pytest.approx(result.step_seconds - 0.03)


def test_what_must_be_said_stands_beside_its_row():
    notes = {(r.method, r.temperature): r.note for r in summed()}
    assert notes["chain of 2", 0.0] is None
    assert notes["chain of 2", 1.0] == CHAIN_SAMPLES_WRONGLY
    assert notes["Sequoia auto", 0.0] == DECLINED
    assert notes["Sequoia 4x2", 1.0] is None
    assert summed(chain_is_wrong=False)[6].note is None


@pytest.mark.parametrize(
    ("tree", "trees", "words"),
    [
        (None, 0, "= plain"),
        (TREE, 0, "= plain"),
        (TREE, 1, "1.50x (1.30x to 1.60x) = plain"),  # trials alone, whose price is shown
        (TREE, 50, "1.50x (1.30x to 1.60x)"),  # that none of them is accepted has its price
    ],
)
def test_without_drafts_a_speedup_is_noise(tree, trees, words):
    counters = {"steps": 50, "tree_steps": trees, "seconds": {"verify": 0.1}}
    runs = [
        measure.MethodRuns(PLAIN, None, 0, [round_run(10)] * 3),
        measure.MethodRuns(
            sequoia("d", SERVED), tree, 3,
            [round_run(rate, 1, tree and counters) for rate in (13, 15, 16)],
        ),
    ]  # fmt: skip
    plain_, found = results(measure.BenchRuns("float32", {CASES[0]: runs}), chain_is_wrong=False)
    assert found.speed_in_words == words
    assert found.is_plain == (words == "= plain")
    assert plain_.speed_in_words == "1.00x (1.00x to 1.00x)"


def test_the_best_chain_is_best_by_what_is_shown():
    """By the median of speedups in each round, and not by that of tokens per second."""
    runs = [
        measure.MethodRuns(PLAIN, None, 0, [round_run(rate) for rate in (10, 10, 20)]),
        measure.MethodRuns(chain("d", 1), None, 1, [round_run(rate) for rate in (11, 15, 21)]),
        measure.MethodRuns(chain("d", 2), None, 2, [round_run(rate) for rate in (12, 13, 26)]),
    ]  # fmt: skip
    found = results(measure.BenchRuns("float32", {CASES[0]: runs}), chain_is_wrong=False)
    assert [one.tokens_per_second.median for one in found[1:]] == [15, 13]
    assert [one.speedup.median for one in found[1:]] == pytest.approx([1.1, 1.3])
    assert [one.best_chain for one in found] == [False, False, True]


def test_rounds_that_disagree_are_told_of_in_each_case():
    assert disagreement(summed()[:1]) is None
    said = disagreement(summed())
    assert said.startswith("rounds disagree by more than 15% (chain of 2 at T=0, batch 1: 1.00x")
    assert "chain of 2 at T=1, batch 1: 1.00x to 2.00x" in said
    assert "plain vLLM at" not in said


def report(origin=None, greedy=None):
    models = BenchModel(name="t", hashes={}, grown_from=origin), BenchModel(name="d", hashes={})
    return BenchReport(
        date="2026-01-31", device="a CPU", target=models[0], draft=models[1], dtype="bfloat16",
        settings={}, results=summed(), greedy=greedy,
        notes=[note for model in models if (note := synthetic_note(model))], provenance={},
    )  # fmt: skip


GROWN = {"from": "small", "layers": 23, "intermediate_size": 44864, "parameters": 8 * 10**8}


def test_report_survives_the_disk():
    written = report(GROWN).to_dict()
    assert written["schema"] == "sequoia-vllm/bench/v1"
    assert BenchReport.model_validate(json.loads(json.dumps(written))) == report(GROWN)
    with pytest.raises(ValidationError, match="speedup"):
        BenchReport.model_validate({**written, "results": [{"method": "plain vLLM"}]})


def test_tables_say_everything_that_must_be_said(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    tie = measure.Mismatch(
        method="chain of 2", batch_size=1, prompt=1, position=7, token=3, plain_token=4,
        gap=0.01, near_tie=True,
    )  # fmt: skip
    wrong = {"method": "Sequoia 4x2", "prompt": 0, "position": 0, "gap": 2.5, "near_tie": False}
    mismatches = [tie, tie.model_copy(update=wrong)]
    greedy = measure.GreedyCheck(compared=9, identical=7, bound=0.25, mismatches=mismatches)
    print_report(report(GROWN, greedy))
    printed = capsys.readouterr().out
    for said in (
        "chain of 2 + *", "= plain", "1.50x (1.00x to 2.00x)",
        "identical to plain vLLM's: 7 of 9", "prompt 2: differs after 7 tokens (3, not 4)",
        "a near-tie (within 0.25 nats)", "2.5 nats below the best: an error",
    ):  # fmt: skip
        assert said in printed
    chains, synthetic = printed.splitlines()[-2:]
    assert chains.startswith("* ")
    assert "vllm-project/vllm#55005" in chains
    assert "synthetic target made from small: 23 layers" in synthetic


def test_the_plot_has_a_line_for_plain_the_best_chain_and_each_tree(tmp_path):
    path = tmp_path / "speeds.svg"
    plot_speeds(report(GROWN), path)
    drawn = path.read_text()
    for name in ("plain vLLM", "vLLM's best chain", "Sequoia, 4 nodes, 2 deep", "requests at once"):
        assert f"<!-- {name} -->" in drawn
    assert "chain of 2" not in drawn
    assert "t with d, bfloat16; synthetic target" in drawn


@pytest.mark.parametrize(
    ("spec", "argv", "said"),
    [
        (None, "/usr/bin/sequoia-vllm bench", "sequoia-vllm bench"),
        ("benchmarks.gpu.rival.__main__", "/x/a.py compare f", "python -m benchmarks.gpu.rival "
         "compare f"),
        ("benchmarks.gpu.kinds", "/x/kinds.py draft f", "python -m benchmarks.gpu.kinds draft f"),
        ("__main__", "examples/train train-head", "python examples/train train-head"),
        (None, "examples/a.py --b", "python examples/a.py --b"),
    ],
)  # fmt: skip
def test_provenance_has_the_command_as_it_was_given(spec, argv, said, monkeypatch):
    main = SimpleNamespace(__spec__=spec and SimpleNamespace(name=spec))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", argv.split())
    assert " ".join(provenance.command_line()) == said


def test_git_revision(tmp_path, monkeypatch):
    def git(*words):
        author = "-c", "user.name=a", "-c", "user.email=a@b"
        return subprocess.check_output(["git", *author, *words], cwd=tmp_path, text=True).strip()

    package = tmp_path / "sequoia_vllm" / "bench"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    assert provenance.git_revision() is None
    (tmp_path / "file").write_text("one")
    git("init")
    git("add", "file")
    git("commit", "-m", "one")
    assert provenance.git_revision() == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert provenance.git_revision() == git("rev-parse", "HEAD") + "+"


def test_too_many_engines_for_the_memory(monkeypatch):
    """Of offloaded ones not the weights count: three layers of 32, twice, and what stays."""
    monkeypatch.setattr(engines, "_available_gib", lambda: 24.0)
    monkeypatch.setenv(OWN_PROCESSES, "1")
    engine = EngineSpec("t", "d", kv_cache_gib=4.0)
    check_memory(engine, 4)
    with pytest.raises(BenchError, match="5 engines need about 25 GiB together, and 24 GiB"):
        check_memory(engine, 5)
    with monkeypatch.context() as patch:
        patch.setenv(OWN_PROCESSES, "0")
        check_memory(engine, 5)
    monkeypatch.setattr(engines, "_weights_gib", lambda model: {"t": 64.0, "d": 1.0}[model])
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=32))
    monkeypatch.setattr(engines, "load_config", lambda model: config)
    offload = OffloadSpec(directory=Path("/"), memory_gib=1.0)
    offloaded = EngineSpec("t", "d", kv_cache_gib=1.0, offload=offload)
    check_memory(offloaded, 2)
    with pytest.raises(BenchError, match="3 engines need about 36 GiB together"):
        check_memory(offloaded, 3)


@pytest.mark.parametrize(
    ("chains", "before", "within"),
    [(["1", "2"], None, "0"), (["1", "2"], "1", "1"), (["1", "2:ngram"], None, None)],
)
def test_engines_in_this_process(chains, before, within, monkeypatch):
    """Not where the user chose, and not with n-grams; afterwards all is as before."""
    monkeypatch.delenv(OWN_PROCESSES, raising=False)
    if before is not None:
        monkeypatch.setenv(OWN_PROCESSES, before)
    with in_this_process(methods("d", chains, [])):
        assert os.environ.get(OWN_PROCESSES) == within
    assert os.environ.get(OWN_PROCESSES) == before


def test_room_for_whole_trees():
    options = measure.BenchSettings(
        EngineSpec("t", "d"), methods=(replace(PLAIN, most_drafts=63),), prompts=([1] * 935,),
        max_tokens=64, batch_sizes=(64,),
    ).engine_options()  # fmt: skip
    assert options["max_model_len"] == 1000 + 63 + 63
    assert options["max_num_batched_tokens"] >= 64 * 65


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-sizes", "1,x"], "whole numbers"),
        (["--temperature", "0,-1"], "numbers from 0 up"),
        (["--temperature", "warm"], "numbers from 0 up"),
        (["--trees", "h200/none"], "no tree named"),
        (["--chain", "2,2"], "given twice"),
        (["--trees", "16x4,16x4"], "given twice"),
        (["--trees", "no-such-file.json"], "No such file"),
        (["--chain", "4:blok"], "4:probabilistic:block"),
        (["--output", "no/such/folder/b.json"], "no directory"),
    ],
)
def test_wrong_options_are_refused_before_any_engine_starts(options, message):
    done = command("bench", "--model", TARGET, "--draft-model", DRAFT, *options, code=2)
    assert message in in_words(done.output)
