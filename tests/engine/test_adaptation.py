"""Engines that draft as much as pays: what the core tells its controller, and what it decides."""

import json
import os
import resource
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.adaptation.state import AdaptationState
from sequoia_vllm.adaptation.step_times import StepTimes, Timed
from sequoia_vllm.engine.common.step_messages import StepOutcome
from sequoia_vllm.engine.core import adapting
from sequoia_vllm.engine.core.adapting import SchedulerAdapter
from sequoia_vllm.engine.v1 import runner
from sequoia_vllm.engine.v2.graph_times import decode_times
from sequoia_vllm.engine.v2.path_copies import DraftingClock
from sequoia_vllm.tree import TokenTree, optimize_tree
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE
from tests.support.engines import (
    configured,
    generated,
    metric,
    plain_outputs,
    runner_of,
    running,
    scheduler_of,
    sequoia,
)
from tests.support.models import prompts, save_random_draft

PROMPTS = prompts(4)
TREE = optimize_tree(REFERENCE_ACCEPTANCE, 16, 4)
GREEDY = SamplingParams(temperature=0, max_tokens=280, ignore_eos=True)


@pytest.mark.engine
def test_drafts_that_do_not_pay_end_and_stay_away(tmp_path, monkeypatch):
    """An untrained draft is never right. By default: nothing is said of adapting."""
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))
    monkeypatch.setattr("sequoia_vllm.engine.core.adapting._SAVE_DECISIONS", 0.0)
    add = StepTimes.add  # whatever else the machine does meanwhile

    def timed(times: StepTimes, drafts: int, batch_size: int, *measured, **other) -> None:
        add(times, drafts, batch_size, 0.01 + drafts / 1000)

    passes = [(drafts, 4, 0.01 + drafts / 1000) for drafts in range(16)]
    monkeypatch.setattr(StepTimes, "add", timed)
    monkeypatch.setattr(runner, "time_passes", lambda _: passes)
    config = sequoia(draft=save_random_draft(tmp_path))
    del config["adapt"]
    with running(config) as llm:
        found = generated(llm, PROMPTS, GREEDY)
        assert scheduler_of(llm).adapter.controller.decided(4) == 0
        trees = metric(llm, "vllm:spec_decode_num_drafts")
        assert metric(llm, "sequoia:measured_speedup") > 0
    assert found == plain_outputs(PROMPTS, GREEDY)
    assert 4 < trees < 100 * 4
    [path] = (tmp_path / "trees" / "adaptation").glob("*.json")
    assert json.loads(path.read_text())["lookup"][4] == 0
    with running(config) as llm:
        short = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        found = generated(llm, PROMPTS, short)
        assert metric(llm, "vllm:spec_decode_num_drafts") <= 4  # of its first step
        # Measuring tools get as many drafts as are configured, whatever was decided.
        llm.collective_rpc("sequoia_limit_drafts", args=(3,))
        assert generated(llm, PROMPTS, short) == found
        assert set(scheduler_of(llm).dynamic_sd_lookup[1:]) == {3}
        assert metric(llm, "vllm:spec_decode_num_drafts") > 4 * 15
    assert found == [tokens[:24] for tokens in plain_outputs(PROMPTS, GREEDY)]


@pytest.mark.engine
def test_tokens_do_not_depend_on_decisions(monkeypatch):
    """Whatever a controller decides, and however often."""
    rng = np.random.default_rng(0)

    def observe(self, step):
        if rng.random() < 0.3:
            self.lookup[:] = [int(rng.choice([0, 1, 3, 7, 15]))] * len(self.lookup)

    monkeypatch.setattr(DraftController, "observe", observe)
    with running(sequoia(adapt=True), max_num_seqs=3) as llm:
        found = generated(llm, PROMPTS, GREEDY)
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 100
    assert found == plain_outputs(PROMPTS, GREEDY)


@pytest.mark.engine
def test_a_cpu_times_passes_before_it_serves(monkeypatch):
    """The controller has them from the first step on. An engine that is frozen times none."""
    took, taken = [], []
    time_passes, take_times = runner.time_passes, DraftController.take_times

    def timed(of: object) -> list[Timed]:
        took.append(found := time_passes(of))
        return found

    def take(controlled: DraftController, times: list[Timed]) -> None:
        take_times(controlled, times)
        taken.append((times, controlled._times.seconds(7, 2)))

    monkeypatch.setattr(runner, "time_passes", timed)
    monkeypatch.setattr(DraftController, "take_times", take)
    one = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for adapt in (True, False):
        with running(sequoia(adapt=adapt), max_num_seqs=4) as llm:
            assert generated(llm, PROMPTS[:1], one) == plain_outputs(PROMPTS[:1], one)
            branches = runner_of(llm).drafter.foretold.branches
            assert (branches.draft is None) is not adapt
            if adapt:  # between the rows that were timed on a line, beyond by rows
                assert branches.draft > 0
                first, few, middle, eight, most, far = branches.pass_time(
                    np.array([1.0, 4.0, 6.0, 8.0, 32.0, 64.0])
                )
                assert [first, middle, far] == pytest.approx([1, (few + eight) / 2, 2 * most])
    [(times, seconds)] = taken
    assert took == [times]
    known = {(drafts, batch): each for drafts, batch, each in times}
    assert seconds == pytest.approx(known[7, 2])
    assert set(known) == {(m, b) for m in range(16) for b in (1, 2, 3, 4) if b * (1 + m) <= 32}
    assert 0 < known[0, 1] < known[15, 1]  # a tree has the draft's passes


# -- steps as vLLM's scheduler describes them ------------------------------------------------


@pytest.mark.parametrize(("adapt", "schedule"), [(False, None), (None, [[1, 8, 15]])])
def test_frozen_engines_draft_as_configured(adapt, schedule):
    """Told so, or because they are told how much to draft at which batch size."""
    config = configured(sequoia(adapt=adapt, num_speculative_tokens_per_batch_size=schedule))
    assert adapting.new_adapter(config, [15] * 9) is None


class NotingController(DraftController):
    def __init__(self) -> None:
        super().__init__(TokenTree.chain(3), [3] * 9, [3] * 9, [3, 1])
        self.steps = []

    def observe(self, step) -> None:
        self.steps.append(step)


@pytest.fixture
def told(monkeypatch, tmp_path):
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path))
    return NotingController()


def step_of(new=(), cached=(), drafts=3, preempted=()) -> SchedulerOutput:
    """``new`` and ``cached``: (request, tokens scheduled, drafts among them, tokens computed)."""
    output = SchedulerOutput.make_empty()
    output.num_spec_tokens_to_schedule = drafts
    output.num_scheduled_tokens = {name: tokens for name, tokens, _, _ in (*new, *cached)}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.scheduled_spec_decode_tokens = {n: [-1] * d for n, _, d, _ in cached if d}
    requests = CachedRequestData.make_empty()
    requests.req_ids = [name for name, *_ in cached]
    requests.num_computed_tokens = [computed for *_, computed in cached]
    output.scheduled_cached_reqs = requests
    greedy = SamplingParams(temperature=0)
    output.scheduled_new_reqs = [
        NewRequestData(name, None, [], greedy, None, ([],), computed, None)
        for name, _, _, computed in new
    ]
    output.preempted_req_ids = set(preempted)
    return output


def test_steps_are_told_with_their_prompts_contexts_and_preemptions(told):
    adapter = SchedulerAdapter(told, "a-pair", keeps=False)
    adapter.before_step(0.75, set())
    adapter.follow(step_of(new=[("a", 100, 0, 0)]), StepOutcome(), 0, 1.0, is_busy=True)
    adapter.before_step(1.25, set())  # within the step
    adapter.follow(step_of(cached=[("a", 4, 3, 100)]), StepOutcome(), 2, 1.5, is_busy=True)
    mixed = step_of(new=[("b", 50, 0, 16)], cached=[("a", 4, 3, 103)], preempted=["c"])
    adapter.follow(mixed, StepOutcome(), 1, 1.75, is_busy=False)
    adapter.before_step(8.0, set())
    changed = step_of(cached=[("a", 4, 3, 105), ("b", 1, 0, 66)], drafts=1)
    adapter.follow(changed, StepOutcome(is_told=True), 0, 9.0, is_busy=True)
    first, alone, mixed, changed = told.steps
    assert [(step.scored, step.drafts) for step in told.steps] == [(0, 3), (3, 3), (3, 3), (3, 1)]
    assert (first.seconds, first.prompts, first.context) == (0.25, 99, 0)
    assert (alone.seconds, alone.prompts, alone.context) == (0.5, 0, 100)
    assert (mixed.seconds, mixed.prompts, mixed.context) == (0.25, 49, 119)
    assert [step.preempted for step in told.steps] == [0, 0, 1, 0]
    assert [step.is_told for step in told.steps] == [False, False, False, True]
    assert [step.follows for step in told.steps] == [False, True, True, False]
    assert (changed.seconds, changed.prompts) == (1.0, 0)
    assert [step.gained for step in told.steps] == [0, 2, 1, 0]
    assert changed.workload == "greedy"


def test_on_gpus_a_step_ends_with_its_drafting(told):
    """Outcomes come before drafting; that of a step with a prompt takes 300 ms, of others 100."""
    adapter = SchedulerAdapter(told, "a-pair", keeps=False)
    decode = step_of(cached=[("a", 4, 3, 9)])
    adapter.before_step(0.0, set())
    for now, scheduled, paths, drafting, is_busy in [
        (0.5, step_of(new=[("a", 100, 0, 0)]), b"", (), True),
        (1.3, decode, b"", (), True),  # 300 ms for the draft to read the prompt
        (1.9, step_of(new=[("b", 50, 0, 0)], cached=[("a", 4, 3, 9)]), b"one", (0.3,), True),
        (2.7, decode, b"two", (0.1, 0.3), False),
        (9.5, decode, b"three", (0.1,), True),  # after a pause
        (10.1, decode, b"", (0.1,), True),
    ]:
        adapter.before_step(9.0, set())
        adapter.follow(scheduled, StepOutcome(paths, drafting=drafting), 0, now, is_busy)
    assert [step.seconds for step in told.steps] == pytest.approx([0.8, 0.6, 0.8, 0.6, 0.6])
    assert [step.prompts for step in told.steps] == [99, 0, 49, 0, 0]
    assert [step.paths for step in told.steps] == [b"one", b"two", b"", b"three", b""]


def test_times_that_a_worker_measured_at_start_are_taken_once(told):
    adapter, timed = SchedulerAdapter(told, "a-pair", keeps=False), []
    told.take_times = timed.append
    for times in (((3, 1, 0.02),), ()):
        adapter.before_step(1.0, set())
        outcome = StepOutcome(times=times)
        adapter.follow(step_of(cached=[("a", 4, 3, 9)]), outcome, 0, 1.5, is_busy=True)
    assert timed == [((3, 1, 0.02),)]


def test_graphs_of_a_decode_step_are_added_up():
    """The smallest that fit; without one of a kind that others have, a time is not known."""
    depths = [0, 1, 2, 2]
    target = {("target", 1, 1): 1.0, ("target", 1, 4): 2.0, ("target", 4, 2): 3.0}
    growth = {("growth", 3, 1): 0.25, ("growth", 3, 2): 0.5, ("growth", 3, 4): 0.75}
    model = {**target, **growth, ("read", 2, 8): 90.0, ("read", 3, 2): 0.125}
    found = [(0, 1, 1.0), (0, 4, 2.0), (3, 1, 3.375), (3, 2, 3.625)]
    assert decode_times(model, depths) == found  # none scores four trees of three drafts
    lookup = {**target, **growth}  # no model reads anything
    assert decode_times(lookup, depths)[2:] == [(3, 1, 3.25), (3, 2, 3.5)]
    head = {**model, ("keys", 1, 2): 0.5, ("dynamic growth", 3, 2): 7.0}
    assert decode_times(head, depths) == [(0, 1, 1.5), (3, 1, 10.125), (3, 2, 10.125)]


def test_a_gpu_times_drafting_without_being_waited_for(monkeypatch):
    now, done = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def query(self) -> bool:
            return self in done

        def elapsed_time(self, other: "Event") -> float:
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = DraftingClock(torch.device("cuda"))
    clock.end()  # of a step that failed
    for seconds in (0.25, 0.5):
        clock.begin()
        now[0] += seconds
        clock.end()
    assert clock.ended() == ()
    done += [end for _, end in clock._under_way]
    assert clock.ended() == pytest.approx((0.25, 0.5))
    assert clock.ended() == ()
    on_cpu = DraftingClock(torch.device("cpu"))
    on_cpu.begin()
    on_cpu.end()
    assert on_cpu.ended() is None


def test_requests_that_a_user_reset_were_not_preempted(told):
    """Drafts that took too much memory are fewer for a while; a reset says nothing of memory."""
    adapter = SchedulerAdapter(told, "a-pair", keeps=False)
    nothing = StepOutcome()
    adapter.before_step(1.0, {"a", "b"})
    adapter.follow(
        step_of(cached=[("c", 4, 3, 9)], preempted=["a", "b", "d"]), StepOutcome(), 0, 1.5, True
    )
    adapter.before_step(1.5, set())
    adapter.follow(step_of(cached=[("c", 4, 3, 9)], preempted=["a"]), nothing, 0, 2.0, True)
    assert [step.preempted for step in told.steps] == [1, 1]


@contextmanager
def disk_is_full() -> Iterator[None]:
    """No file of this process may have more than 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """As a user who may look into folders of ours, and no more, where this one is root."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.fixture
def shared(monkeypatch) -> Iterator[Path]:
    """What an engine of ours has learned, in a folder that all may look into."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("SEQUOIA_VLLM_TREES", folder)
        first = adapter_of_a_pair()
        first._save(first.controller.state())
        yield Path(folder) / "adaptation" / "a-pair.json"


def adapter_of_a_pair() -> SchedulerAdapter:
    return SchedulerAdapter(DraftController(TREE, [15] * 5, [15] * 5, range(16)), "a-pair")


def test_a_full_disk_keeps_what_was_whole(shared, caplog):
    adapter, before = adapter_of_a_pair(), shared.read_text()
    caplog.clear()
    with disk_is_full():
        for _ in range(2):
            adapter._save(adapter.controller.state())
    [line] = caplog.messages
    assert "what was learned about drafts is not kept" in line
    assert shared.read_text() == before
    assert list(shared.parent.iterdir()) == [shared]


def test_another_users_file_is_left_alone(shared, caplog):
    before = shared.read_text()
    shared.chmod(0o000)
    shared.parent.chmod(0o555)
    caplog.clear()
    with as_somebody_else():
        adapter = adapter_of_a_pair()
        for _ in range(2):
            adapter._save(adapter.controller.state())
    read, kept = caplog.messages
    assert "learning about drafts from the start" in read
    assert "is not kept" in kept
    shared.parent.chmod(0o755)
    shared.chmod(0o644)
    assert shared.read_text() == before


def test_a_torn_file_is_named_and_written_anew(shared, caplog):
    shared.write_bytes(shared.read_bytes()[:200])
    caplog.clear()
    adapter = adapter_of_a_pair()
    [line] = caplog.messages
    assert "from the start" in line
    assert "a-pair.json" in line
    adapter._save(adapter.controller.state())
    assert AdaptationState.load(shared).parents == list(TREE.parents)


def test_engines_that_save_at_once_leave_a_whole_file(shared):
    """Their processes may have one number: in containers that share a folder."""
    adapters = [adapter_of_a_pair() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        saves = [
            pool.submit(each._save, each.controller.state()) for each in adapters for _ in range(50)
        ]
        while not all(save.done() for save in saves):
            assert AdaptationState.load(shared).parents == list(TREE.parents)
    assert not any(adapter._has_failed_to_keep for adapter in adapters)
    assert list(shared.parent.iterdir()) == [shared]


@pytest.mark.parametrize(
    ("drafter", "on_gpu", "has_room", "least", "most"),
    [
        pytest.param("model", False, False, [3, 1, 0], [7, 3, 1], id="a CPU"),
        pytest.param("lookup", False, False, [5, 2, 0], [11, 5, 2], id="drafts without a model"),
        pytest.param("model", True, False, [15, 15, 5], [15, 15, 15], id="a GPU"),
        pytest.param("model", False, True, [15, 15, 15], [15, 15, 15], id="weights from a disk"),
    ],
)
def test_engines_begin_with_what_is_expected_to_pay(
    monkeypatch, tmp_path, drafter, on_gpu, has_room, least, most
):
    """One, two and eight requests, where no step was measured yet, whatever is scheduled."""
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path))
    settings = SimpleNamespace(tree=TREE, drafter=drafter, adapts_as="p", keeps=False)
    monkeypatch.setattr(adapting, "SequoiaSettings", SimpleNamespace(of=lambda _: settings))
    monkeypatch.setattr(adapting, "reachable_drafts", lambda _: [15] * 8)
    monkeypatch.setattr(adapting, "fewer_drafts", lambda _: [15, 11, 7, 5, 3, 2, 1])
    monkeypatch.setattr(adapting, "is_offloaded", lambda _: has_room)
    config = SimpleNamespace(use_v2_model_runner=on_gpu)
    controller = adapting.new_adapter(config, [15] * 9).controller
    begins = [controller.lookup[size] for size in (1, 2, 8)]
    assert all(map(int.__le__, least, begins)), begins
    assert all(map(int.__le__, begins, most)), begins
