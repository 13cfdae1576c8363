"""From counts to vectors and from recorded steps to curves, without an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from sequoia_vllm.calibration.acceptance import AcceptanceSettings, acceptance_file, class_name
from sequoia_vllm.calibration.counts import estimate_acceptance, spine_tree, wilson_interval
from sequoia_vllm.calibration.engines import load_prompts, token_windows
from sequoia_vllm.calibration.errors import CalibrationError
from sequoia_vllm.calibration.provenance import model_hashes
from sequoia_vllm.calibration.step_times import (
    BatchTimes,
    TimedStep,
    batch_curves,
    measuring_tree,
    steady_steps,
)
from sequoia_vllm.cli import app
from sequoia_vllm.hardware.cost import CostModel, Prefixes
from sequoia_vllm.hardware.profile import Profile
from sequoia_vllm.tree import Acceptance, TokenTree


def test_pure_parts_import_no_vllm():
    modules = [f"calibration.{name}" for name in ("counts", "step_times", "profile", "acceptance")]
    code = (
        "import sys, "
        + ", ".join(f"sequoia_vllm.{module}" for module in [*modules, "cli.calibrate"])
        + "; assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- acceptance ------------------------------------------------------------------


def test_spine_tree():
    # 0 ── 1 2 3
    assert spine_tree(3) == TokenTree((-1, 0, 0, 0))
    # 0 ── 1 2, 1 ── 3 4, 3 ── 5 6
    assert spine_tree(2, 3) == TokenTree((-1, 0, 0, 1, 1, 3, 3))


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


def test_a_vector_is_shares_of_trials():
    found = estimate_acceptance([[200, 200, 100]], [[120, 20, 5]])
    assert found.acceptance == [[0.6, 0.1, 0.05]]
    assert found.trials == [[200, 200, 100]]
    assert all(
        low < p < high
        for low, p, high in zip(found.low[0], found.acceptance[0], found.high[0], strict=True)
    )


def test_rows_below_depth_one():
    offered = [[100, 100], [60, 60], [0, 0]]  # nobody came to depth 2
    found = estimate_acceptance(offered, [[60, 10], [45, 3], [0, 0]])
    assert found.acceptance == [[0.6, 0.1], [0.75, 0.05]]


def test_shares_of_trimmed_trees_stay_a_vector():
    found = estimate_acceptance([[100, 50]], [[80, 20]])
    assert sum(found.acceptance[0]) == pytest.approx(1.0)
    Acceptance.of(found.acceptance)


def test_no_tree_at_all():
    with pytest.raises(CalibrationError, match="no tree was verified"):
        estimate_acceptance([[0, 0]], [[0, 0]])


def test_the_interval_covers_the_truth():
    truth = np.array([0.6, 0.1, 0.05, 0.01])
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(500):
        taken = rng.multinomial(400, [*truth, 1 - truth.sum()])[:4]
        found = estimate_acceptance([[400] * 4], [taken.tolist()])
        covered.append((np.array(found.low[0]) <= truth) & (truth <= np.array(found.high[0])))
    assert 0.92 < np.mean(covered) < 0.98


def test_acceptance_file(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    settings = AcceptanceSettings("org/t", "org/d", prompts, temperature=0.7, top_p=0.9, depth=2)
    stats = {
        "offered": [[10, 10], [6, 6]], "accepted": [[6, 1], [3, 1]],
        "tree_steps": 10, "tokens": 17,
    }  # fmt: skip
    estimate = estimate_acceptance(stats["offered"], stats["accepted"])
    file = acceptance_file(settings, "mine", estimate, stats)
    assert file.vector.probability(0, depth=1) == 0.5
    assert file.trials == [[10, 10], [6, 6]]
    assert (file.temperature, file.top_p) == (0.7, 0.9)
    assert file.provenance["counts"]["tree_steps"] == 10
    assert str(tmp_path) not in json.dumps(file.to_dict())
    flat = AcceptanceSettings("org/t", "org/d", prompts)
    assert acceptance_file(flat, "mine", estimate, stats).acceptance == [0.6, 0.1]


def test_class_names():
    assert class_name("My Pair_T0.6") == "my-pair-t0.6"
    assert class_name("--") == "measured"


# -- times -----------------------------------------------------------------------

TARGET = {1: 0.010, 2: 0.020, 4: 0.021, 8: 0.024}
GROWTH = {1: 0.0, 2: 0.0, 4: 0.001, 8: 0.002}  # verification of more nodes
LEVEL = {1: 0.002, 2: 0.003}
PLAIN_REST, TREE_REST, COMMITTED = 0.001, 0.004, 2


def records(batch: int, size: int, count: int = 8, slower: float = 1.0) -> list[dict]:
    """Steps of an engine that takes exactly the times above."""
    made, clock = [], 100.0
    widths = [len([n for n in level if tree.children[n]])
              for tree in [measuring_tree(size)] for level in tree.levels[1:]]  # fmt: skip
    widths = [COMMITTED, *(width for width in widths if width)] if size > 1 else []
    for _ in range(count):
        passes = [(width * batch, 0.8 * slower * LEVEL[width]) for width in widths]
        drafting = slower * sum(LEVEL[width] for width in widths)
        rest = TREE_REST + GROWTH[size] if size > 1 else PLAIN_REST
        made.append(
            {
                "start": clock, "requests": batch, "fewest": size, "most": size,
                "target": slower * TARGET[size], "drafting": drafting, "passes": passes,
            }
        )  # fmt: skip
        clock += slower * (TARGET[size] + rest) + drafting
    return made


def measured(batch: int, sizes=(2, 4, 8)) -> BatchTimes:
    """Three rounds, of which the last is three times as slow."""

    def rounds(size: int):
        return [steady_steps(records(batch, size, slower=x), batch, size) for x in (1.1, 1.0, 3.0)]

    return BatchTimes(batch, rounds(1), {size: rounds(size) for size in sizes})


def test_measuring_tree_has_levels_of_many_widths():
    assert measuring_tree(8).parents == (-1, 0, 0, 1, 1, 2, 2, 3)
    uniform = Acceptance.of([0.5, 0.5])
    assert Prefixes.of(measuring_tree(64), uniform).widths[-1].tolist() == [2, 4, 8, 16, 1, 0]


def test_curves_are_those_of_the_quietest_round():
    found = batch_curves(measured(2), context_length=128)
    assert found.draft.tokens == [1, 2]
    # Sharing what is outside the passes evenly moves a little between the levels.
    assert found.draft.seconds == pytest.approx([LEVEL[1], LEVEL[2]], rel=0.1)
    assert found.overhead.plain_seconds == pytest.approx(PLAIN_REST)
    assert found.overhead.tree_seconds == pytest.approx(TREE_REST, abs=2e-4)
    assert found.target.tokens == [1, 2, 4, 8]
    expected = [TARGET[n] + GROWTH[n] for n in (1, 2, 4, 8)]
    assert found.target.seconds == pytest.approx(expected, abs=3e-4)
    assert found.target.spread[0] > 0.001
    assert found.forward_seconds == pytest.approx(TARGET)


def test_the_curves_add_up_to_the_measured_steps():
    """What the cost model says of the measured trees is what was measured."""
    found = batch_curves(measured(2), context_length=128)
    profile = Profile(
        source="measured", date="2026-01-01", device="cpu", target="t", draft="d",
        target_parameters=2, draft_parameters=1, target_forward=[found.target],
        draft_level=[found.draft], overhead=[found.overhead],
    )  # fmt: skip
    cost = CostModel(profile)
    assert cost.plain_seconds(2) == pytest.approx(found.step_seconds[1], abs=1e-6)
    for size in (2, 4, 8):
        tree = measuring_tree(size)
        prefixes = Prefixes.of(tree, Acceptance.of([0.5, 0.5]))
        # The records committed COMMITTED tokens in each step.
        prefixes = Prefixes(np.full(size, float(COMMITTED)), prefixes.widths)
        seconds = cost.prefix_seconds(prefixes, 2)[-1]
        assert seconds == pytest.approx(found.step_seconds[size], abs=1e-6)


def cheap_first_pass(timed: TimedStep) -> TimedStep:
    """Drafting's first pass takes no time at all (it may run another kernel than levels do)."""
    step = timed.step
    saved = LEVEL[COMMITTED]
    levels = [(step.passes[0][0], 0.0), *step.passes[1:]]
    return TimedStep(replace(step, drafting=step.drafting - saved, passes=levels), timed.seconds)


def test_overhead_is_never_negative():
    times = measured(1)
    trees = {
        size: [[cheap_first_pass(timed) for timed in steps] for steps in rounds]
        for size, rounds in times.trees.items()
    }
    found = batch_curves(BatchTimes(1, times.plain, trees), context_length=128)
    assert found.overhead.tree_seconds >= 0
    assert min(found.target.seconds) > 0


def test_only_steady_steps_count():
    steps = records(2, 4, count=4)
    prefill = {**steps[0], "fewest": 1, "most": 7}  # as many tokens in all
    fewer = {**steps[0], "requests": 1}
    mixed = [prefill, *steps[:3], fewer, steps[3]]
    assert len(steady_steps(mixed, 2, 4)) == 2  # the third is followed by another kind
    assert steady_steps(mixed, 2, 8) == []
    assert len(steady_steps(records(2, 1), 2, 1)) == 7


def test_missing_steps():
    times = measured(2)
    with pytest.raises(CalibrationError, match=r"no step had 2 requests of 1 tokens.*kv-cache"):
        batch_curves(BatchTimes(2, [[], []], times.trees), 128)
    with pytest.raises(CalibrationError, match="no step had 2 requests of 4 tokens"):
        batch_curves(BatchTimes(2, times.plain, {**times.trees, 4: [[]]}), 128)
    with pytest.raises(CalibrationError, match="second level"):
        batch_curves(BatchTimes(2, times.plain, {2: times.trees[2]}), 128)


# -- prompts and provenance ------------------------------------------------------


def test_token_windows():
    windows = token_windows([[1, 2, 3], [4, 5, 6]], count=3, length=4)
    assert windows == [[1, 2, 3, 4], [3, 4, 5, 6], [5, 6, 1, 2]]
    assert token_windows([[7]], 2, 3) == [[7, 7, 7], [7, 7, 7]]
    with pytest.raises(CalibrationError, match="no tokens"):
        token_windows([[], []], 1, 4)


def test_prompt_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert load_prompts(path) == ["a", "b"]
    assert load_prompts(path, 1) == ["a"]
    with pytest.raises(CalibrationError, match="holds 2 prompts, not 3"):
        load_prompts(path, 3)
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(CalibrationError, match="line 2"):
        load_prompts(path)
    with pytest.raises(CalibrationError, match="name a file with --prompts"):
        load_prompts(tmp_path / "none.jsonl")


def test_model_hashes(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert list(model_hashes(str(tmp_path))) == ["config.json"]
    assert model_hashes("org/model-by-name") == {}


# -- the command -----------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(app, ["calibrate", *arguments])


PAIR = ("--target", "t", "--draft", "d")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("acceptance", *PAIR, "--prompts", "none.jsonl"), "name a file with --prompts"),
        (("acceptance", *PAIR, "--output", "no/such/dir/x.json"), "there is no directory"),
        (("profile", *PAIR, "--tokens", "1;2"), "whole numbers separated by commas"),
        (("profile", *PAIR, "--tokens", "1,2"), "the largest at least 4"),
        (("profile", *PAIR, "--batch-sizes", "0"), "batch size 0"),
        (("profile", *PAIR, "--context", "8"), "context 8 is too short"),
        (("profile", *PAIR), "no tokenizer for the target 't'"),
    ],
)
def test_friendly_errors(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["acceptance", "profile"])
def test_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--draft" in result.output
