"""From recorded steps to the curves of a profile, and the profile command, without an engine."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sequoia_vllm.calibration import measure_profile
from sequoia_vllm.calibration.measure_profile import ProfileSettings, Rounds, goes_on
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.hardware.choose import MAX_DEPTH
from sequoia_vllm.hardware.cost import CostModel, Prefixes
from sequoia_vllm.hardware.step_curves import (
    BatchTimes,
    StepRecord,
    batch_curves,
    measuring_tree,
    steady_steps,
)
from sequoia_vllm.hardware.step_profile import Profile, ProfileError
from sequoia_vllm.measuring.engines import EngineSpec, token_windows
from sequoia_vllm.tree import Acceptance
from sequoia_vllm.tree.optimize import Frontier

TARGET = {1: 0.010, 2: 0.020, 4: 0.021, 8: 0.024}
GROWTH = {1: 0.0, 2: 0.0, 4: 0.001, 8: 0.002}  # preparing inputs of more nodes
VERIFY = {1: 0.0, 2: 0.0003, 4: 0.0004, 8: 0.0007}
COMMIT = 0.0002  # part of what follows
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
                "target": slower * TARGET[size], "verify": VERIFY[size],
                "commit": COMMIT if size > 1 else 0.0, "drafting": drafting, "passes": passes,
            }
        )  # fmt: skip
        clock += slower * (TARGET[size] + rest) + drafting + VERIFY[size]
    return made


def measured(batch: int) -> BatchTimes:
    """Three rounds: a lucky one, the usual one, and one three times as slow."""

    def rounds(size: int):
        return [steady_steps(records(batch, size, slower=x), batch, size) for x in (0.5, 1.0, 3.0)]

    return BatchTimes(batch, 128, rounds(1), {size: rounds(size) for size in (2, 4, 8)})


def test_curves_are_those_of_the_middle_round():
    found = batch_curves(measured(2))
    sizes = [1, 2, 4, 8]
    assert found.draft.tokens == [1, 2]
    # Sharing what is outside the passes evenly moves a little between the levels.
    assert found.draft.seconds == pytest.approx([LEVEL[1], LEVEL[2]], rel=0.1)
    assert found.overhead.plain_seconds == pytest.approx(PLAIN_REST)
    assert found.overhead.tree_seconds == pytest.approx(TREE_REST, abs=2e-4)
    assert (found.target.tokens, found.verification.tokens) == (sizes, sizes[1:])
    assert found.verification.seconds == pytest.approx([VERIFY[n] for n in sizes[1:]])
    assert found.overhead.commit_seconds == COMMIT
    assert found.overhead.context_length == found.target.context_length == 128
    expected = [TARGET[n] + GROWTH[n] for n in sizes]
    assert found.target.seconds == pytest.approx(expected, abs=3e-4)
    assert min(found.target.spread[0], *found.draft.spread) > 0.001
    assert found.verification.spread == [0, 0, 0]
    assert found.forward_seconds == pytest.approx(TARGET)


def test_the_curves_add_up_to_the_measured_steps():
    """What the cost model says of the measured trees is what was measured."""
    found = batch_curves(measured(2))
    profile = Profile(
        source="measured", date="2026-01-01", device="cpu", target="t", draft="d",
        target_parameters=2, draft_parameters=1, target_forward=[found.target],
        draft_level=[found.draft], verification=[found.verification], overhead=[found.overhead],
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


def test_overhead_is_never_negative():
    """Also where drafting's first pass takes no time at all: another kernel than levels run."""

    def cheap(step: StepRecord) -> StepRecord:
        (rows, _), *levels = step.passes
        drafting = step.drafting - LEVEL[COMMITTED]
        return replace(step, drafting=drafting, passes=[(rows, 0.0), *levels])

    times = measured(1)
    trees = {
        size: [list(map(cheap, steps)) for steps in rounds] for size, rounds in times.trees.items()
    }
    found = batch_curves(BatchTimes(1, 128, times.plain, trees))
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
    with pytest.raises(ProfileError, match=r"no step had 2 requests of 1 tokens.*kv-cache"):
        batch_curves(BatchTimes(2, 128, [[], []], times.trees))
    with pytest.raises(ProfileError, match="no step had 2 requests of 4 tokens"):
        batch_curves(BatchTimes(2, 128, times.plain, {**times.trees, 4: [[]]}))
    with pytest.raises(ProfileError, match="second level"):
        batch_curves(BatchTimes(2, 128, times.plain, {2: times.trees[2]}))


def test_the_ladder_ends_where_a_step_is_as_long_as_many_plain_ones():
    times = measured(1)
    plain_step = TARGET[1] + PLAIN_REST
    assert goes_on([], times, 8)
    usual = times.trees[8][1]
    slow = [replace(step, seconds=12.5 * plain_step) for step in usual]
    assert not goes_on([], replace(times, trees={**times.trees, 8: [slow]}), 8)
    # One slow round does not end it.
    rounds = [usual, slow, usual]
    assert goes_on([], replace(times, trees={**times.trees, 8: rounds}), 8)


def a_step(target, passes=(), most=1, seconds=None):
    """A timed step of one request with these passes of 2 ms each."""
    drafting = 0.002 * len(passes)
    return StepRecord(
        start=0.0, requests=1, fewest=most, most=most, target=target, verify=0.001,
        drafting=drafting, passes=[(width, 0.002) for width in passes],
        seconds=target + drafting + 0.003 if seconds is None else seconds,
    )  # fmt: skip


def climbed(ladder, target_of):
    """The sizes that are timed where a target pass over n tokens takes ``target_of(n)``."""
    times = BatchTimes(1, 64, [[a_step(0.1)] * 8], {})
    for size in (2, 4, 8, 16, 32, 64):
        levels = [1] * measuring_tree(size).depth
        times.trees[size] = [[a_step(target_of(size), levels)] * 8]
        if size >= 4 and not goes_on(ladder, times, size):
            break
    return list(times.trees)


USUAL = Acceptance.of([[0.6, 0.12, 0.06, 0.03]])


def test_the_ladder_ends_where_no_larger_tree_can_win():
    ladder = [Frontier.of(USUAL, 64, MAX_DEPTH)]
    assert climbed(ladder, lambda n: 0.1)[-1] == 64  # another token costs nothing
    assert climbed(ladder, lambda n: 0.1 + 0.01 * n)[-1] == 16
    assert climbed(ladder, lambda n: 0.1 * n) == [2, 4]
    # Without acceptance it is the 12 plain steps that end it.
    assert climbed([], lambda n: 0.1 * n) == [2, 4, 8, 16]


@pytest.mark.parametrize("slope", [0.0, 0.0003, 0.001, 0.003, 0.01, 0.03])
def test_what_is_not_timed_was_not_the_answer(slope):
    """The best tree up to the ladder's end is the best of all sizes."""
    frontier = Frontier.of(USUAL, 64, 24)

    def speed(size):
        depths = range(1, 25)
        seconds = 0.1 + slope * size + 0.004
        return max(frontier.expected_tokens[size, d] / (seconds + 0.002 * d) for d in depths)

    last = climbed([Frontier.of(USUAL, 64, MAX_DEPTH)], lambda n: 0.1 + slope * n)[-1]
    best = max(range(2, 65), key=speed)
    assert best <= last or speed(best) < 1 / 0.103


def test_a_slow_moment_does_not_end_the_ladder():
    timed, slow = (a_step(target, [1] * 3, 8, target + 0.01) for target in (0.1, 5.0))
    times = BatchTimes(1, 64, [[a_step(0.1, seconds=0.1)] * 5], {8: [[timed] * 3 + [slow] * 2]})
    assert goes_on([Frontier.of(USUAL, 64, MAX_DEPTH)], times, 8)


def test_token_windows():
    windows = token_windows([[1, 2, 3], [4, 5, 6]], count=3, length=4)
    assert windows == [[1, 2, 3, 4], [3, 4, 5, 6], [5, 6, 1, 2]]
    assert token_windows([[7]], 2, 3) == [[7, 7, 7], [7, 7, 7]]
    with pytest.raises(CalibrationError, match="no tokens"):
        token_windows([[], []], 1, 4)


class FakeEngine:
    """Answers what `Rounds` asks of an engine; a run takes ``seconds`` of its clock."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds
        self._size = 1
        self.ran = []

    def collective_rpc(self, name, args=()):
        if name == "sequoia_limit_drafts":
            self._size = args[0] + 1
        if name == "sequoia_take_steps":
            return [records(self._batch, self._size)]
        return None

    def generate(self, requests, params, use_tqdm):
        assert params.max_tokens == 24
        self._batch = len(requests)
        self.ran.append((self._batch, self._size))
        self._clock.now += self._seconds


@pytest.fixture
def ran(monkeypatch):
    """Rounds over a ladder where a run takes so long: what ran on both engines, and reports."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(measure_profile.time, "monotonic", lambda: clock.now)

    def run(ladder, seconds=1, **options):
        settings = ProfileSettings(
            EngineSpec("t", "d"), batch_sizes=(1,), tokens=(1, 2, 4, 8), contexts=(64,),
            max_tokens=24, **options,
        )  # fmt: skip
        engines, reports = [FakeEngine(clock, seconds) for _ in range(2)], []
        measuring = Rounds(
            settings, [[1, 2, 3]], ladder, engines, lambda *report: reports.append(report)
        )
        measuring.run()
        return measuring.times[0], *(sorted(engine.ran) for engine in engines), reports

    return run


@pytest.mark.parametrize(("seconds", "enough", "rounds"), [(1, 60, 3), (9, 60, 2), (9, None, 3)])
def test_no_round_begins_when_measuring_took_long_enough(ran, seconds, enough, rounds):
    times, plain, sequoia, reports = ran([], seconds, rounds=3, enough_seconds=enough)
    assert plain == [(1, 1)] * rounds
    assert sequoia == sorted([(1, 2), (1, 4), (1, 8)] * rounds)
    assert len(reports) == 4 * rounds
    assert batch_curves(times).target.tokens == [1, 2, 4, 8]


def test_sizes_that_cannot_win_are_left_out_of_all_rounds(ran):
    # A step of 4 takes twice a plain one.
    poor = [Frontier.of(Acceptance.of([0.1, 0.02]), 8, MAX_DEPTH)]
    _, _, sequoia, reports = ran(poor, rounds=2)
    assert sequoia == [(1, 2), (1, 2), (1, 4), (1, 4)]
    assert reports[-1][1:] == (5, 6)
