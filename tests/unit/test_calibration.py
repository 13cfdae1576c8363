"""From counts to acceptance vectors, and runs that stop and go on, without an engine."""

import json
import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from sequoia_vllm.calibration import measure_acceptance as acceptance_module
from sequoia_vllm.calibration.acceptance_task import (
    AcceptanceSettings,
    AcceptanceTask,
    add_counts,
    class_name,
    estimate_acceptance,
    precision,
    probing_tree,
    tokens_margin,
    wilson_interval,
)
from sequoia_vllm.calibration.measure_acceptance import Workload, measure_acceptance
from sequoia_vllm.cli import app
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.measuring.provenance import model_hashes
from sequoia_vllm.prompts import BUILTIN
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree
from tests.support.models import DRAFT, TARGET

tune = import_module("sequoia_vllm.cli.tune")


# -- counts ----------------------------------------------------------------------


def test_probing_tree():
    # 0 ── 1 2 3
    assert probing_tree(3) == TokenTree((-1, 0, 0, 0))
    assert probing_tree(1, 3) == TokenTree((-1, 0, 1, 2))
    # 0 ─┬─ 1 ─┬─ 3 ─┬─ 7
    #    │     │     └─ 8
    #    │     └─ 4 ─┬─ 9
    #    └─ 2 ─┬─ 5  └─ 10
    #          └─ 6
    assert probing_tree(2, 3) == TokenTree((-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4))
    assert probing_tree(16, 3).size == 1 + 5 * 16
    # Below 7 and 8, too, go on two children of each.
    with_tail = probing_tree(3, 2, 2)
    assert with_tail.parents[:10] == probing_tree(3, 2).parents
    assert with_tail.parents[10:] == (4, 4, 5, 5, 10, 10, 11, 11)
    assert probing_tree(1, 2, 3) == probing_tree(1, 5)


def test_how_well_tokens_per_step_are_known():
    """They are known as well as they repeat: the same vector counted again and again."""
    random, truth = np.random.default_rng(0), np.array([[0.5, 0.2, 0.0], [0.6, 0.1, 0.1]])
    tree, trials = optimize_tree(Acceptance.of(truth), 24, 6), [[300] * 3, [150] * 3]
    found = []
    for _ in range(400):
        counted = [
            random.multinomial(n[0], [*row, 1 - row.sum()])[:3] / n[0]
            for row, n in zip(truth, trials, strict=True)
        ]
        found.append(tree.expected_tokens(Acceptance.of(np.array(counted))))
    margin = tokens_margin(tree, Acceptance.of(truth), trials)
    assert margin == pytest.approx(1.96 * np.std(found), rel=0.15)
    assert tokens_margin(TokenTree((-1,)), Acceptance.of(truth), trials) == 0


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),  # scipy.stats.binomtest(8, 10).proportion_ci(method="wilson")
        (0, 100, 0.0, 0.036995),
        (100, 100, 0.963005, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-5)


def test_rows_below_depth_one():
    offered = [[1000, 1000], [600, 600], [0, 0]]  # nobody came to depth 2
    found = estimate_acceptance(offered, [[600, 100], [450, 30], [0, 0]])
    assert found.acceptance == [[0.6, 0.1], [0.75, 0.05]]


def test_rows_of_few_trials_are_left_out():
    """The optimizer would use the last one for all depths below it."""
    offered = [[150, 150], [100, 100], [99, 99], [100, 100]]
    found = estimate_acceptance(offered, [[90, 9]] * 4)
    assert [row[0] for row in found.trials] == [150, 100]
    alone = estimate_acceptance([[5, 5]], [[3, 1]])  # the root's row always stays
    assert alone.acceptance == [[0.6, 0.2]]


def test_precision_is_the_widest_half_width_by_reach():
    offered, accepted = [[400, 400], [200, 200]], [[200, 40], [100, 10]]
    found = estimate_acceptance(offered, accepted)
    low, high = wilson_interval(200, 400)
    assert precision(found) == pytest.approx((high - low) / 2, abs=1e-5)
    # An entry counts by how often it is reached: here the second row is the wider one.
    low, high = wilson_interval(100, 200)
    steep = estimate_acceptance([[400, 400], [200, 200]], [[399, 0], [100, 10]])
    assert precision(steep) == pytest.approx((high - low) / 2 * 0.5, abs=1e-5)


def test_no_tree_at_all():
    with pytest.raises(CalibrationError, match="no tree was verified"):
        estimate_acceptance([[0, 0]], [[0, 0]])


# -- which completions run -------------------------------------------------------


def finish_all(workload: Workload, most: int = 100) -> list[tuple[int, int]]:
    """Runs completions one by one; each generates tokens 100, 101, ... up to its limit."""
    ran = []
    while len(ran) < most and (completion := workload.next()):
        ran.append((completion.prompt, len(completion.tokens)))
        made = range(100, 100 + workload.max_tokens - len(completion.before))
        workload.update(completion, list(made), ended=completion.prompt == 1)
    return ran


def test_sampled_passes_go_round():
    workload = Workload([[1], [2, 2]], greedy=False, max_tokens=4)
    assert finish_all(workload, most=5) == [(0, 1), (1, 2), (0, 1), (1, 2), (0, 1)]
    again = Workload([[1], [2, 2]], greedy=False, max_tokens=4, started=5)
    assert again.next().prompt == 1
    assert workload.state()["completions"] == {}


def test_greedy_completions_are_counted_once():
    """Longer ones would repeat themselves, and promise more than completions of this length."""
    workload = Workload([[1], [2, 2], [3]], greedy=True, max_tokens=4)
    assert finish_all(workload) == [(0, 1), (1, 2), (2, 1)]
    assert workload.state()["completions"][0] == [100, 101, 102, 103]
    assert workload.state()["ended"] == [1]


def test_a_greedy_workload_goes_on_from_its_state():
    options = {"greedy": True, "max_tokens": 4}
    workload = Workload([[1], [2], [3], [4]], **options)
    first, second, third = workload.next(), workload.next(), workload.next()
    workload.update(first, [7, 8, 9, 9])
    workload.update(third, [6, 0], ended=True)
    workload.update(second, [5])  # interrupted here
    state = json.loads(json.dumps(workload.state()))
    kept = {int(prompt): ids for prompt, ids in state["completions"].items()}
    again = Workload(
        [[1], [2], [3], [4]], **options, started=state["started"], completions=kept,
        ended=set(state["ended"]),
    )  # fmt: skip
    order = [again.next() for _ in range(2)]
    assert [completion.tokens for completion in order] == [[2, 5], [4]]
    assert [again.max_tokens - len(completion.before) for completion in order] == [3, 4]
    assert again.next() is None


# -- runs, with an engine made of dice --------------------------------------------

TRUTH = np.array([0.6, 0.1, 0.05])


class DiceEngine:
    """Accepts child k of the root with probability TRUTH[k]; each tree emits a token or two."""

    def __init__(self, seed: int, interrupt_after: int | None, number: int = signal.SIGINT) -> None:
        self.llm_engine = self.renderer = self
        self._rng = np.random.default_rng(seed)
        self._left = interrupt_after
        self._signal = number
        self._requests: dict[str, tuple[list[int], int]] = {}
        self._counts = np.zeros(3, dtype=int)
        self._trees = 0
        self.seen: list[list[int]] = []

    def collective_rpc(self, name, args):
        assert name == "sequoia_stats"
        return [
            {
                "tree_steps": self._trees, "tokens": self._trees + int(self._counts.sum()),
                "offered": [[self._trees] * 3], "accepted": [self._counts.tolist()],
            }
        ]  # fmt: skip

    def render_cmpl(self, prompts):
        return prompts

    def add_request(self, request_id, prompt, params):
        assert params.seed is None
        self._requests[request_id] = ([], params.max_tokens)
        self.seen.append(prompt["prompt_token_ids"])

    def step(self):
        if self._left is not None and self._left == 0:
            if self._signal == signal.SIGINT:
                raise KeyboardInterrupt  # workers in the background ignore the signal
            os.kill(os.getpid(), self._signal)
        self._left = None if self._left is None else self._left - 1
        outputs = []
        for request_id, (tokens, most) in list(self._requests.items()):
            taken = self._rng.multinomial(1, [*TRUTH, 1 - TRUTH.sum()])[:3]
            self._counts += taken
            self._trees += 1
            tokens += [1] * (1 + int(taken.sum()))
            del tokens[most:]
            finished = len(tokens) == most
            if finished:
                del self._requests[request_id]
            completion = SimpleNamespace(token_ids=list(tokens), finish_reason="length")
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[completion], finished=finished)
            )
        return outputs


@pytest.fixture
def dice(monkeypatch):
    """Replaces vLLM; ``interrupt_after`` steps Ctrl-C comes. Keeps the engines made."""
    made = SimpleNamespace(interrupt_after=None, signal=signal.SIGINT, engines=[])

    @contextmanager
    def open_engine(engine, *, seed, **options):
        made.engines.append(DiceEngine(seed, made.interrupt_after, made.signal))
        yield made.engines[-1]

    monkeypatch.setattr(acceptance_module, "open_engine", open_engine)
    return made


def task(**settings) -> AcceptanceTask:
    options = {"branch": 3, "depth": 1, "max_tokens": 32, "batch_size": 4, **settings}
    return AcceptanceTask.prepare(AcceptanceSettings(EngineSpec(TARGET, DRAFT), **options), "dice")


def first_prompts(folder: Path, count: int) -> Path:
    """A file with the first built-in prompts."""
    file = folder / "few.jsonl"
    file.write_text("\n".join(BUILTIN.read_text("utf-8").splitlines()[:count]), "utf-8")
    return file


def run(chosen: AcceptanceTask, previous=None, **options) -> AcceptanceFile:
    return measure_acceptance(chosen, previous, checkpoint_seconds=0, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_runs_until_the_precision_is_reached(dice, temperature):
    saved = []
    found = run(task(precision=0.05, temperature=temperature), save=saved.append)
    state = found.calibration
    assert (state.complete, state.stopped_by) == (True, "precision")
    assert state.precision <= 0.05 < saved[-2].calibration.precision
    # 0.98 / sqrt(n) = 0.05 at n = 369 for p = 0.6
    assert 360 < state.trees < 380
    assert np.abs(np.array(found.acceptance) - TRUTH).max() < 0.1
    assert not saved[0].calibration.complete
    assert found.temperature == temperature


def test_stops_at_the_most_tokens(dice):
    state = run(task(precision=0.001, max_tokens_total=200)).calibration
    assert (state.complete, state.stopped_by) == (True, "tokens")
    assert 190 <= state.tokens < 215
    assert state.precision > 0.001


def test_greedy_runs_stop_when_every_completion_is_long_enough(dice, tmp_path):
    chosen = task(precision=0.001, prompts=first_prompts(tmp_path, 2))
    state = run(chosen).calibration
    assert (state.complete, state.stopped_by) == (True, "prompts")
    assert state.started == len(dice.engines[0].seen) == 2
    assert 2 * 32 <= state.tokens <= 2 * 33


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_interrupted_run_goes_on(dice, temperature, tmp_path):
    prompts = first_prompts(tmp_path, 6)
    chosen = task(precision=0.05, temperature=temperature, prompts=prompts, max_tokens=128)
    dice.interrupt_after = 40
    first = run(chosen)
    state = first.calibration
    assert (state.complete, state.stopped_by) == (False, "interrupt")
    assert state.trees == 40 * 4
    assert "(interrupted)" in first.description
    restored = AcceptanceFile.model_validate_json(json.dumps(first.to_dict())).calibration
    dice.interrupt_after = None
    final = run(chosen, restored).calibration
    assert (final.complete, final.stopped_by) == (True, "precision")
    own = dice.engines[1].collective_rpc("sequoia_stats", ())[0]
    assert final.trees == 160 + own["tree_steps"]
    assert final.accepted == add_counts(state.accepted, own["accepted"])
    before, after = (engine.seen for engine in dice.engines)
    if temperature == 0:
        assert final.completions == {}
        # Nothing is generated twice: what was in flight goes on behind its last token.
        assert len({tuple(tokens) for tokens in before + after}) == len(before) + len(after)
        assert any(tokens[-1] == 1 for tokens in after[:4])


def test_interrupted_before_anything(dice):
    dice.interrupt_after = 0
    with pytest.raises(KeyboardInterrupt):
        run(task())


def test_what_is_another_measurement(tmp_path):
    chosen = task()
    dice_state = SimpleNamespace(measures=chosen.measures)
    assert chosen.differences(dice_state) == []
    # Where it stops does not matter, what is measured does.
    finer = replace(chosen, settings=replace(chosen.settings, precision=0.001, batch_size=1))
    assert finer.differences(dice_state) == []
    assert task(temperature=0.5).differences(dice_state) == ["temperature", "top_p"]
    fewer = task(prompts=first_prompts(tmp_path, 3))
    assert fewer.differences(dice_state) == ["prompts", "prompts_sha256", "prompts_used"]
    assert task(branch=4).differences(dice_state) == ["branch"]


# -- files -----------------------------------------------------------------------


def test_acceptance_files_hide_where_prompts_lie(dice, tmp_path):
    prompts = tmp_path / "mine.txt"
    prompts.write_text("def f():\nclass A:\n")
    found = run(task(prompts=prompts, temperature=0.7, top_p=0.9, max_tokens_total=100))
    assert "temperature 0.7, top-p 0.9" in found.description
    assert "mine.txt" in found.description
    assert (found.temperature, found.top_p) == (0.7, 0.9)
    assert found.calibration.measures["prompts_used"] == 2
    assert str(tmp_path) not in json.dumps(found.to_dict())
    assert list(found.calibration.measures["target_sha256"]) == ["config.json", "model.safetensors"]
    assert list(found.provenance["settings"]) == [
        "target", "draft", "prompts", "max_tokens", "temperature", "top_p", "branch", "depth",
        "precision", "max_tokens_total", "batch_size", "tree", "verification", "dtype",
        "tensor_parallel_size", "enforce_eager", "kv_cache_gib", "offload",
    ]  # fmt: skip
    assert found.provenance["settings"]["prompts"] == "mine.txt"


def test_class_names():
    assert class_name("My Pair_T0.6") == "my-pair-t0.6"
    assert class_name("--") == "measured"


def test_model_hashes(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert list(model_hashes(str(tmp_path))) == ["config.json"]
    assert model_hashes("org/model-never-downloaded") == {}
    assert model_hashes("/no/such/directory") == {}


def test_prompts_too_long_for_the_target(tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("x = 1; " * 3000 + "\nshort\n")
    assert len(task(prompts=prompts).prompts) == 1
    prompts.write_text("x = 1; " * 3000)
    with pytest.raises(CalibrationError, match="no prompt leaves room for 32 tokens"):
        task(prompts=prompts)


# -- the command -----------------------------------------------------------------

PAIR = ("--model", TARGET, "--draft-model", DRAFT)
SMALL = ("--max-tokens", "32")


@pytest.fixture
def few(monkeypatch):
    """Few children and depths, known roughly."""
    monkeypatch.setattr(tune, "FULL", replace(tune.FULL, branch=3, depth=1, precision=0.1))


def call(*arguments: str):
    return CliRunner().invoke(app, ["tune", "--only", "acceptance", *arguments])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_counting_again(dice, few, tmp_path, monkeypatch, number, code):
    monkeypatch.chdir(tmp_path)
    # Dice are so fast that a second between checkpoints is a very long time.
    monkeypatch.setitem(measure_acceptance.__kwdefaults__, "checkpoint_seconds", 0)
    dice.interrupt_after, dice.signal = 5, number
    result = call(*PAIR, *SMALL, "-o", "a.json")
    assert result.exit_code == code
    assert "a.json keeps 40 trees" in result.stderr
    assert not AcceptanceFile.load("a.json").calibration.complete
    dice.interrupt_after = None
    result = call(*PAIR, *SMALL, "-o", "a.json", "--json")
    assert result.exit_code == 0
    assert "going on from a.json: 40 trees" in result.stderr
    assert json.loads(result.stdout)["calibration"]["complete"]
    assert json.loads(result.stdout) == AcceptanceFile.load("a.json").to_dict()
    result = call(*PAIR, *SMALL, "-o", "a.json")
    assert "holds this measurement already" in result.stderr
    assert len(dice.engines) == 2
    result = call(*PAIR, *SMALL, "-o", "a.json", "--temperature", "0.5")
    assert "holds another measurement (temperature, top_p differ): starting" in result.stderr
    assert len(dice.engines) == 3
    # More exactly: what was sampled before counts.
    monkeypatch.setattr(tune, "FULL", replace(tune.FULL, precision=0.05))
    result = call(*PAIR, *SMALL, "-o", "a.json", "--temperature", "0.5")
    assert "going on from a.json" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json"]


@pytest.mark.parametrize(
    ("only", "arguments", "message"),
    [
        ("acceptance", "--prompts none.jsonl", "name a file with --prompts"),
        ("acceptance", "--output no/such/dir/x.json", "there is no directory"),
        ("acceptance", "--output .", "is a directory: name a file"),
        ("acceptance", "--acceptance a.json", "acceptance measures what --acceptance gives"),
        ("acceptance", "--batch-sizes 0", "batch size 0"),
        ("acceptance", "--model t", "the target 't' is no folder here"),
        ("acceptance", "--draft-model d", "the draft 'd' is no folder here"),
        ("times", "--tokens 1;2", "whole numbers separated by commas"),
        ("times", "--tokens 1,2", "the largest at least 4"),
        ("times", "--batch-sizes 0", "batch size 0"),
        ("times", "--context 8", "too short for 32 tokens per completion; give at least 17"),
        ("times", "--context 256,99999", "contexts [256, 99999]: the target takes"),
        ("times", "--context 0,256", "give at least 1"),
        ("times", "--profile p.json", "--only times measures what --profile gives"),
        ("times", "--prompts none.txt", "name a file with --prompts"),
        ("times", "--output no/such/dir/x.json", "there is no directory"),
    ],
)
def test_friendly_errors(tmp_path, monkeypatch, only, arguments, message):
    """Before anything is written. Of a repeated option the last counts."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["tune", "--only", only, *PAIR, *arguments.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_other_files_are_not_taken_for_calibrations(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{}")
    result = call(*PAIR, "-o", str(path))
    assert result.exit_code == 2
    assert path.read_text() == "{}"


def test_the_largest_of_the_batch_sizes_is_counted_at_once(dice, few, tmp_path):
    for more, expected in ((["--batch-sizes", "1,3"], 3), ([], 8)):
        path = tmp_path / f"a{expected}.json"
        assert call(*PAIR, *SMALL, *more, "-o", str(path)).exit_code == 0
        found = AcceptanceFile.load(path)
        assert found.provenance["settings"]["batch_size"] == expected
        assert found.name == path.stem
