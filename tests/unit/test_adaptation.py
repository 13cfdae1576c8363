"""Drafts that follow what an engine measures, in simulated engines with scripted acceptance."""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from math import exp, inf

import numpy as np
import pytest

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.adaptation.speeds import Speeds
from sequoia_vllm.adaptation.state import AdaptationState, FadingAcceptance, StateError
from sequoia_vllm.adaptation.step_times import StepTimes
from sequoia_vllm.adaptation.trials import Step
from sequoia_vllm.hardware.budget import drafts_by_batch, fit_to_budget
from sequoia_vllm.metrics.counts import TreeCounts, paths_of
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE
from tests.support.open_loop import Machine, Request, Seen, Server, poisson, walks_of
from tests.support.step_clock import MACHINE as STEADY

PROSE, CODE, NONE = (0.55, 0.1, 0.05), (0.85, 0.08, 0.03), (0.05, 0.01, 0.0)
TREE = optimize_tree(Acceptance.of([0.6, 0.15, 0.08]), 16, 8)
SIZES = [1, 3, 7, 15]
FINER = [1, 2, 3, 5, 7, 11, 15]  # where no number needs CUDA graphs
BATCHES = 65
PACE_LASTS = 300  # steps until a machine's pace has changed


def controller(drafts: int = 15, most: int = 15, sizes: list[int] = SIZES, rows: int = 0):
    """A controller; with ``rows`` its batches begin with so many nodes in all."""
    made = DraftController(TREE, [drafts] * BATCHES, [most] * BATCHES, sizes)
    if rows:
        made.begin_with(rows)
    return made


@dataclass
class Engine:
    """Steps take a plain one's time, plus ``slope`` per draft and ``draft`` if there are any."""

    controlled: DraftController
    acceptance: tuple
    batch_size: int = 1
    slope: float = 0.02
    draft: float = 0.3
    noise: float = 0.05
    workload: str = "greedy"
    with_trees: float = 1.0  # share of the requests
    reading: int = 0  # steps that take five times as long, before the first drafts of a while
    unread: int = 0
    drift: float = 0.0  # of the machine's pace: the standard deviation of its logarithm
    seed: int = 0
    history: list = field(default_factory=list)
    pace: float = 0.0  # its logarithm

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def time_of(self, drafts: int) -> float:
        return 1.0 + (self.draft + self.slope * drafts) * (drafts > 0)

    def speed_of(self, drafts: int) -> float:
        tokens = TREE.trim(drafts + 1).expected_tokens(Acceptance.of(self.acceptance))
        return (1 + self.with_trees * (tokens - 1)) / self.time_of(drafts)

    def fastest(self) -> float:
        return max(map(self.speed_of, [0, *FINER]))

    def verify(self, drafts: int) -> tuple[int, bytes]:
        """Accepted drafts of a step, and their paths."""
        trees = round(self.batch_size * self.with_trees)
        if drafts == 0 or trees == 0:
            return 0, b""
        walks = walks_of(TREE, self.acceptance)
        accepted = walks[self.rng.integers(len(walks), size=trees)]
        accepted = np.where(accepted <= drafts, accepted, -1)  # a prefix of the tree
        paths = paths_of(TREE, accepted, np.full(trees, drafts + 1)).tobytes()
        return int((accepted >= 0).sum()), paths

    def run(self, steps: int) -> "Engine":
        self.tokens = self.seconds = 0.0
        self.plain_seconds = 0.0  # that plain decoding would have taken for the same tokens
        for _ in range(steps):
            drafts = self.controlled.lookup[self.batch_size]
            last = self.history[-1] if self.history else None
            seconds = self.time_of(drafts) * self.rng.lognormal(0, self.noise)
            if self.drift:
                moved = self.rng.normal(0, self.drift * (2 / PACE_LASTS) ** 0.5)
                self.pace += moved - self.pace / PACE_LASTS
                seconds *= exp(self.pace)
            if drafts > 0 and last == 0:
                self.unread = self.reading
            gained, paths = self.verify(drafts) if self.unread == 0 else (0, b"")
            if self.unread > 0:
                self.unread -= 1
                seconds *= 5
            self.tokens += self.batch_size + gained
            self.seconds += seconds
            self.plain_seconds += exp(self.pace) * (1 + gained / self.batch_size)
            same = drafts if drafts == last else None
            self.controlled.observe(
                Step(self.batch_size, same, seconds, self.workload, paths, gained=gained)
            )
            self.history.append(drafts)
        return self

    @property
    def speed(self) -> float:
        """Tokens per request and second of the latest run."""
        return self.tokens / self.batch_size / self.seconds


def nothing_accepted(trees: int, drafts: int = 15) -> bytes:
    return paths_of(TREE, np.full((trees, TREE.depth), -1), np.full(trees, drafts + 1)).tobytes()


def rejected(trees: int, drafts: int = 15) -> TreeCounts:
    return TreeCounts.from_bytes(TREE, nothing_accepted(trees, drafts))


@pytest.mark.parametrize("sizes", [SIZES, FINER])
@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_speculation_that_does_not_pay_is_off_within_200_steps(batch_size, sizes):
    engine = Engine(controller(sizes=sizes), NONE, batch_size).run(200)
    assert engine.controlled.lookup[batch_size] == 0
    # From then on trials cost next to nothing, and never bring it back.
    engine.run(4000)
    assert engine.speed > 0.98 * engine.fastest()
    assert engine.history[-3000:].count(0) > 0.95 * 3000


def test_what_is_said_to_be_drafted_changes_with_decisions_alone():
    """Trials come and go every few hundred steps; metrics and the log leave them out."""
    engine, said = Engine(controller(), PROSE).run(4), []
    assert engine.controlled.speedup is None  # before a step without drafts was seen
    for _ in range(3000):
        engine.run(1)
        said.append(engine.controlled.decided(1))
    trials = np.count_nonzero(np.diff(engine.history))
    assert np.count_nonzero(np.diff(said)) <= engine.controlled.decisions < trials / 2


@pytest.mark.parametrize(
    ("acceptance", "draft", "slope"),
    [((0.6, 0.1, 0.05), 0.5, 0.1), ((0.85, 0.08, 0.03), 1.2, 0.3)],
    ids=["drafting gains a fifth", "drafting gains nothing"],
)
def test_the_speedup_is_true_on_a_machine_whose_pace_changes(acceptance, draft, slope):
    """Else drafts are kept because plain steps were timed while all steps took longer."""
    told, true = [], []
    for seed in range(6):
        engine = Engine(
            controller(1, sizes=FINER), acceptance, draft=draft, slope=slope, drift=0.25, seed=seed
        ).run(1000)
        for _ in range(80):
            engine.run(100)
            told.append((engine.controlled.speedup, engine.seconds))
            true.append((engine.plain_seconds, engine.seconds))
    speedups, seconds = np.array(told).T
    plain, ours = np.array(true).sum(axis=0)
    assert np.average(speedups, weights=seconds) == pytest.approx(plain / ours, rel=0.05)
    assert plain / ours > 0.99


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_speedup_is_of_the_last_seconds(batch_size):
    """A load whose drafts are accepted, one whose are not, then one without drafts."""
    controlled = controller()
    controlled._known.times.restore([(0, batch_size, 0.02), (15, batch_size, 0.03)])
    controlled._decide = controlled._try = lambda *_: None  # drafts as scripted
    first = np.full((batch_size, 1), TREE.children[0][0])
    accepted = paths_of(TREE, first, np.full(batch_size, 16)).tobytes()
    for drafts, seconds, seen, gained, expected in [
        (15, 0.03, accepted, batch_size, 2 / 1.5),
        (15, 0.03, accepted, 0, 1 / 1.5),  # behind the ends of requests
        (15, 0.03, nothing_accepted(batch_size), 0, 1 / 1.5),
        (0, 0.02, b"", 0, 1.0),
    ]:
        for _ in range(1000):
            controlled.observe(Step(batch_size, drafts, seconds, "greedy", seen, gained=gained))
        assert controlled.speedup == pytest.approx(expected, rel=0.05)


def test_what_could_not_pay_if_it_took_no_longer_than_fewer_drafts_is_not_tried():
    acceptance = (0.3, 0.05, 0.02)
    engine = Engine(controller(), acceptance, draft=1.0).run(3000)
    assert engine.controlled.lookup[1] == 0
    assert 1 in engine.history  # whose time says that 3 and 7 are not worth a trial
    assert not {3, 7} & set(engine.history)
    # But where they would take a draft's own time only, they are.
    assert 7 in Engine(controller(), PROSE, draft=0.05).run(3000).history


@pytest.mark.parametrize("batch_size", [1, 4])
def test_first_trials_are_early_and_later_ones_cost_next_to_nothing(batch_size):
    """Drafts double a step's time, and could each pay until they are tried."""
    engine = Engine(controller(), PROSE, batch_size, slope=0.12, draft=0.7).run(300)
    assert engine.controlled.state().lookup[batch_size] == 0  # but for a trial
    engine.run(2000)
    assert engine.speed > 0.99 * engine.fastest()
    assert engine.history[300:].count(0) < 2000  # something is tried again


@pytest.mark.parametrize("batch_size", [1, 4])
def test_what_the_draft_reads_first_is_not_the_time_of_its_drafts_but_lost(batch_size):
    engine = Engine(controller(), NONE, batch_size, reading=15).run(300)
    assert engine.controlled.lookup[batch_size] == 0
    engine.run(6000)
    assert engine.speed > 0.98 * engine.fastest()
    engine.acceptance = CODE
    engine.run(15_000)
    assert engine.controlled.lookup[batch_size] > 0


def test_drafts_that_were_left_for_slow_first_steps_come_back_soon():
    """A batch size's first steps may wait for memory, or for prompts. All drafts are best here."""
    found = []
    for seed in range(8):
        engine = Engine(controller(), PROSE, 4, slope=0.05, draft=0.65, seed=seed).run(4)
        engine.slope, engine.draft = 0.01, 0.1
        engine.run(46)
        found.append(engine.controlled.decided(4))
    assert found.count(15) >= 7


def test_greedy_and_sampled_requests_are_known_apart():
    engine = Engine(controller(), CODE, 4).run(1500)
    assert engine.controlled.lookup[4] > 0
    engine.acceptance, engine.workload = NONE, "sampled"
    engine.run(300)
    assert engine.controlled.lookup[4] == 0
    engine.acceptance, engine.workload = CODE, "greedy"
    engine.run(2)  # what is known of greedy requests is known still
    assert engine.controlled.lookup[4] > 0


def test_requests_without_drafts_count():
    """Three quarters of the batch gain nothing: the rest does not pay for all."""
    engine = Engine(controller(), CODE, 8, slope=0.1, with_trees=0.25).run(600)
    assert engine.fastest() == engine.speed_of(0)
    assert engine.history[200:].count(0) > 300


def test_smaller_batches_are_left_alone_and_larger_ones_begin_with_no_more_drafts():
    engine = Engine(controller(), NONE, 4).run(300)
    assert engine.controlled.lookup[4:] == [0] * (BATCHES - 4)
    assert set(engine.controlled.lookup[1:4]) == {15}


def test_never_more_than_the_most():
    engine = Engine(controller(drafts=7, most=7), CODE, slope=0.0).run(3000)
    assert max(engine.history) == 7


def test_numbers_that_only_some_batches_of_an_octave_have_are_no_error():
    """One draft is scheduled at batch 8 alone, and nothing else fits."""
    schedule = [0] * 8 + [1] + [0] * (BATCHES - 9)
    controlled = DraftController(TREE, schedule, [1] * BATCHES, [3, 7, 15])
    controlled._known.acceptance["greedy"].add(rejected(100))
    for batch_size, steps in [(8, 200), (12, 1000)]:
        for _ in range(steps):
            drafts = controlled.lookup[batch_size]
            controlled.observe(Step(batch_size, drafts, 1.0 + 0.4 * (drafts > 0), "greedy"))
    assert controlled.lookup[12] == 0


def test_schedules_without_drafts_are_tried_late():
    """Reading what was committed may take long where nothing was drafted yet."""
    engine = Engine(controller(drafts=0), CODE).run(390)
    assert set(engine.history) == {0}
    engine.run(2000)
    assert engine.controlled.lookup[1] > 0


@pytest.mark.parametrize(("drafts", "steps"), [(None, 500), (15, 2000)])
def test_other_kinds_of_steps_count_for_nothing_and_trials_that_never_run_are_given_up(
    drafts, steps
):
    """A worker that drafts nothing, whatever it is told, or batches that end at once."""
    controlled = controller()
    for _ in range(steps):
        controlled.observe(Step(4, drafts, 1.0, "greedy"))
    assert controlled.lookup.count(15) >= BATCHES - 4
    if drafts is None:
        assert controlled.lookup == [15] * BATCHES
        assert controlled.state().times == []


def test_drafts_that_are_never_accepted_end_though_steps_without_them_seemed_slower():
    """The machine was disturbed while no drafts were tried."""
    controlled = controller()
    last = 15
    for _ in range(300):
        drafts = controlled.lookup[1]
        paths = nothing_accepted(1, drafts)
        seconds = 1.4 if drafts == 0 else 1.3
        controlled.observe(
            Step(1, drafts if drafts == last else None, seconds, "greedy", paths if drafts else b"")
        )
        last = drafts
    assert controlled.lookup[1] == 0


# A device that computes much while it reads its weights, and one that computes little.
GPU, CPU = Machine(), Machine(row=1.2e-3, context=1e-7, tree_context=3e-7, draft=0.05)
# Two cores with a target of 800M parameters, and what is drafted there at first.
TWO_CORES = Machine(0.08, 8e-3, 8e-7, 2.4e-6, 0.05, disturbed=0.02)
TWO_CORES_SCHEDULE = [0] + [5] * 3 + [2] * 4 + [1] * (BATCHES - 8)
WEAK = (0.35, 0.08, 0.04)
# By a request's place in the trace.
CODE_THEN_WEAK, LONGER = (lambda x: CODE if x < 0.5 else WEAK), (lambda x: 64 if x < 0.4 else 1000)
BUDGET, MOST_RUNNING = 512, 64


def server_of(controlled: DraftController, machine: Machine, **limits) -> Server:
    def observe(*, drafts: int, is_steady: bool, **seen) -> None:
        steady = drafts if is_steady else None
        controlled.observe(Step(drafts=steady, grown=drafts, workload="greedy", **seen))

    server = Server(TREE, machine, controlled.lookup, observe, **limits)
    server.controlled = controlled
    return server


def controlled_server(machine: Machine, drafts: int = 15, **limits: int) -> Server:
    """A server whose controller begins with a schedule that fits its budget."""
    fitting = fit_to_budget([(1, 1, drafts)], drafts, MOST_RUNNING, BUDGET)
    schedule, sizes = [0, *drafts_by_batch(fitting, drafts, MOST_RUNNING)], SIZES
    if machine is TWO_CORES:
        schedule, sizes = TWO_CORES_SCHEDULE, FINER
    controlled = DraftController(TREE, schedule, [15] * BATCHES, sizes)
    return server_of(controlled, machine, budget=BUDGET, **limits)


def fixed_servers(machine: Machine, **limits: int) -> dict[int, Server]:
    """Servers that draft the same at all batch sizes, by drafts; 0: plain decoding."""
    return {
        drafts: Server(TREE, machine, [drafts] * BATCHES, budget=BUDGET, **limits)
        for drafts in (0, *SIZES)
    }


def bursts() -> list[Request]:
    trace = poisson(6, 800, PROSE)
    for place, request in enumerate(trace):
        request.arrival = 8.0 * (place // 40)
    return trace


@pytest.mark.parametrize(
    ("machine", "trace", "share"),
    [
        pytest.param(GPU, partial(poisson, 4, 400, PROSE), 0.98, id="prose"),
        pytest.param(GPU, partial(poisson, 4, 500, PROSE, prompt=500), 0.98, id="long prompts"),
        pytest.param(CPU, partial(poisson, 1, 320, WEAK), 0.98, id="a small device"),
        pytest.param(GPU, partial(poisson, 6, 600, CODE_THEN_WEAK), 0.98, id="drifting acceptance"),
        pytest.param(GPU, partial(poisson, 3, 800, PROSE, LONGER), 0.98, id="drifting contexts"),
        pytest.param(GPU, bursts, 0.98, id="bursts"),
        # Where nothing pays: plain decoding is the best.
        pytest.param(GPU, partial(poisson, 4, 500, NONE), 0.99, id="no acceptance"),
        pytest.param(
            GPU, partial(poisson, 16, 1500, NONE, 256, 16), 0.99, id="prompts in most steps"
        ),
    ],
)
def test_users_wait_no_longer_than_with_the_best_fixed_number_of_drafts(machine, trace, share):
    fixed = [Seen.of(server.serve(trace())) for server in fixed_servers(machine).values()]
    seen = Seen.of(controlled_server(machine).serve(trace()))
    assert seen.seconds_per_token <= min(one.seconds_per_token for one in fixed) / share
    assert seen.tokens_per_second >= share * max(one.tokens_per_second for one in fixed)


def test_more_requests_than_can_be_served_are_served_as_fast_as_by_the_best_choice():
    """All arrive at once; on a small device drafts take time from prompts."""
    trace = partial(poisson, 1e6, 400, WEAK)
    fixed = [Seen.of(one.serve(trace())) for one in fixed_servers(CPU).values()]
    seen = Seen.of(controlled_server(CPU).serve(trace()))
    assert seen.drained_per_second >= 0.98 * max(one.drained_per_second for one in fixed)


def test_where_load_grows_tokens_come_as_fast_as_with_the_best_choice():
    """A busy hour after a quiet one: larger batches than any before."""
    rng = np.random.default_rng(0)
    loads = [(0.3, 12), (0.9, 26), (2, 72)]
    traces = [poisson(rate, count, PROSE, 32, 64, rng) for rate, count in loads]

    def tokens_per_second(server: Server, traces: list[list[Request]]) -> float:
        for trace in traces:
            for request in trace:
                request.arrival += server.clock
            server.serve(trace)
        return Seen.of(traces[-1]).tokens_per_second

    fixed = fixed_servers(TWO_CORES, most_running=16).values()
    best = max(tokens_per_second(server, deepcopy(traces)) for server in fixed)
    server = controlled_server(TWO_CORES, most_running=16)
    assert tokens_per_second(server, traces) >= 0.98 * best


CHAT_MODEL = Machine(0.045, 3.4e-3, 1e-7, 2e-7, draft=0.03, disturbed=0.02)  # on two cores


def untuned_server(machine: Machine, seed: int, most_running: int = 1, rows: int = 6) -> Server:
    """A server as an engine for CPUs begins, whose schedule is the whole tree.

    It begins with 6 nodes in all where nothing was measured, and with 32 where that was.
    """
    limits = {"most_running": most_running, "rng": np.random.default_rng(seed)}
    return server_of(controller(sizes=FINER, rows=rows), machine, **limits)


@pytest.mark.parametrize("machine", [CHAT_MODEL, TWO_CORES])
def test_the_first_requests_lose_little(machine):
    """Two answers of 48 tokens, one after the other, and any acceptance."""

    def seconds(server: Server, acceptance: tuple) -> float:
        return server.serve([Request(0.0, 40, 48, acceptance, n) for n in range(2)])[-1].last

    relative = []
    for acceptance in (NONE, WEAK, PROSE, CODE):
        fixed = fixed_servers(machine, most_running=1).values()
        best = min(seconds(server, acceptance) for server in fixed)
        for seed in range(4):
            relative.append(best / seconds(untuned_server(machine, seed), acceptance))
    assert np.mean(relative) > 0.93


@pytest.mark.parametrize(("acceptance", "least"), [(NONE, 0.96), (PROSE, 0.97)])
@pytest.mark.parametrize("rows", [6, 32])
def test_a_start_under_load_loses_little(rows, acceptance, least):
    """Two requests a second come at once, on a device that has no room for whole trees."""

    def tokens_per_second(server: Server, seed: int) -> float:
        return Seen.of(server.serve(poisson(2, 160, acceptance, 32, 64, seed))).tokens_per_second

    relative = []
    for seed in range(8):
        fixed = fixed_servers(TWO_CORES, most_running=16).values()
        best = max(tokens_per_second(server, seed) for server in fixed)
        server = untuned_server(TWO_CORES, seed, 16, rows)
        relative.append(tokens_per_second(server, seed) / best)
    assert np.mean(relative) > least
    assert min(relative) > 0.94


def test_batches_begin_with_as_many_nodes_in_all():
    """More drafts may pay for one request later, which says little of batches."""
    controlled = controller(sizes=FINER, rows=6)
    assert controlled.lookup[1:8] == [5, 2, 1, 1, 1, 1, 1]
    Engine(controlled, CODE).run(500)
    assert controlled.state().lookup[1] > 5
    assert controlled.lookup[2:] == [2] + [1] * (BATCHES - 3)
    scheduled = DraftController(TREE, [0, 3, 0, 3], [15] * 4, FINER)
    scheduled.begin_with(6)
    assert scheduled.lookup[1:] == [3, 0, 1]


def test_where_nothing_is_drafted_the_fewest_drafts_are_tried_first():
    """More might gain more by what is assumed of them, and cost more to find out."""
    controlled = controller(drafts=0, sizes=FINER)
    controlled._known.acceptance["greedy"].add(rejected(20, 1))
    engine = Engine(controlled, NONE, 16).run(1000)
    assert next(filter(None, engine.history)) == 1


def test_children_that_were_never_offered_are_assumed():
    """A chain says nothing of second children: as many as leave room beside the first."""
    for share, assumed in [(0.5, REFERENCE_ACCEPTANCE.probability(1)), (1.0, 0.0)]:
        fading = FadingAcceptance(TREE)
        counts = TreeCounts(TREE)
        counts.values[0] = 1000
        counts.offered[:, 0], counts.accepted[:, 0] = 1000, round(1000 * share)
        fading.add(counts)
        assert fading.estimate().probability(0) == pytest.approx(share, abs=0.01)
        assert fading.estimate().probability(1) == pytest.approx(assumed, abs=0.01)


@pytest.mark.parametrize("answer", [2, 3, 8, 20, 100])
@pytest.mark.parametrize(
    ("clients", "machine"), [(1, GPU), (1, CPU), (1, STEADY), (4, GPU), (4, CPU)]
)
def test_the_speedup_is_what_clients_see(clients, machine, answer):
    """Each asks again at once; tokens behind a request's end are nothing to its user."""

    def ends(server: Server) -> np.ndarray:
        count = 4000 * clients // answer
        trace = [Request(0.0, 40, answer, PROSE, number) for number in range(count)]
        return np.array([request.last for request in server.serve(trace)])

    plain = Server(TREE, machine, [0] * BATCHES, most_running=clients)
    server = controlled_server(machine, most_running=clients)
    told, observe = [], server.observe

    def keep(**step) -> None:
        observe(**step)
        told.append((server.clock, server.controlled.speedup))

    server.observe = keep
    ours, theirs = ends(server), ends(plain)
    half = len(ours) // 2
    seen = (theirs[-1] - theirs[half]) / (ours[-1] - ours[half])
    times, gains = map(np.array, zip(*(one for one in told if one[0] > ours[half]), strict=True))
    shown = np.average(gains[1:], weights=np.diff(times))
    # Without drafts several clients stay in step. Their prompts are read at once, which costs more.
    # The metric knows nothing of it: for answers of 3 tokens it is 0.87 to 0.94 of the clients'.
    assert (0.96 if clients == 1 else 0.86) < shown / seen < 1.03
    assert seen > 0.98


def test_where_drafts_cause_preemptions_trees_shrink_first():
    limits = {"slots": 32 * 110, "most_running": 32}
    trace = partial(poisson, 1e6, 300, PROSE)
    fixed = fixed_servers(GPU, **limits)
    seen = [Seen.of(server.serve(trace())) for server in fixed.values()]
    server = controlled_server(GPU, **limits)
    adapted = Seen.of(server.serve(trace()))
    per_step = server.preemptions / len(server.history)  # counts differ by chance, either way
    assert per_step < 0.9 * fixed[15].preemptions / len(fixed[15].history)
    assert adapted.drained_per_second >= 0.95 * max(one.drained_per_second for one in seen)


def preempted_steps(controlled: DraftController, preempted: int, steps: int = 20) -> None:
    for _ in range(steps):
        controlled.observe(Step(4, None, None, "greedy", preempted=preempted))


def test_trees_shrink_by_sizes_and_grow_again_once_it_is_calm():
    controlled = controller()
    preempted_steps(controlled, 1)
    assert controlled.lookup == [15] * 4 + [7] * (BATCHES - 4)
    preempted_steps(controlled, 1)
    assert controlled.lookup[4:] == [3] * (BATCHES - 4)
    preempted_steps(controlled, 0, 1001)
    assert controlled._most == [15] * BATCHES
    preempted_steps(controlled, 1, 17 * 4 + 2)
    assert controlled.lookup[4] == 0
    preempted_steps(controlled, 1)  # without drafts they are not the drafts'
    assert controlled._most == [15] * BATCHES
    controlled.lookup[4] = 7
    preempted_steps(controlled, 1)  # nothing is asked of drafts for a while
    assert controlled.lookup[4] == 7


def test_decisions_are_logged_at_most_once_a_minute(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("sequoia_vllm.adaptation.controller.time.monotonic", lambda: now[0])
    caplog.set_level("INFO", "vllm.sequoia.adaptation")
    engine = Engine(controller(), NONE).run(300)
    [off] = caplog.messages
    assert off.startswith("Sequoia: speculation off at batch 1 (plain 1 tokens/s, with drafts 1)")
    caplog.clear()
    engine.acceptance = CODE
    engine.run(15_000)
    assert engine.controlled.decisions > 2
    assert caplog.messages == []
    now[0] = 61.0
    engine.run(300)
    [on] = caplog.messages
    assert on.startswith("Sequoia: ")
    assert "drafts at batch 1 (" in on


def test_an_engine_goes_on_where_the_last_one_ended(tmp_path):
    first = Engine(controller(), NONE).run(500)
    path = tmp_path / "folder" / "state.json"
    first.controlled.state().save(path)
    state = AdaptationState.load(path)
    second = controller()
    assert second.restore(state)
    assert second.lookup == first.controlled.lookup
    assert second.lookup[1] == 0
    assert set(Engine(second, NONE).run(300).history) == {0}  # nothing is tried anew at once
    # Of another tree and another schedule.
    assert not DraftController(TREE.trim(8), [7] * BATCHES, [7] * BATCHES, SIZES).restore(state)
    smaller = controller(drafts=7)
    assert smaller.restore(state)
    assert set(smaller.lookup) == {7}  # what was counted is taken over, the table is not
    path.write_text("{}")
    with pytest.raises(StateError, match=r"state\.json"):
        AdaptationState.load(path)


def test_times_of_before_a_restart_are_tried_soon():
    """Also of a machine where steps without drafts took as long as those with drafts do here."""
    state = Engine(controller(), PROSE).run(500).controlled.state()
    assert state.lookup[1] > 0
    plain = [*state.times, (0, 1, 1.0)]
    slow = [(drafts, size, 8 * seconds) for drafts, size, seconds in state.times]
    for times, draft in ((plain, 0.3), (slow, 2.0)):
        second = controller()
        assert second.restore(state.model_copy(update={"times": times}))
        history = Engine(second, PROSE, draft=draft).run(200).history
        assert 0 in history
    assert second.lookup[1] == 0


def test_a_state_is_saved_as_before_a_trial():
    engine = Engine(controller(), CODE)
    while len(set(engine.controlled.lookup)) == 1:
        engine.run(1)
    assert engine.controlled.state().lookup == [15] * BATCHES


def test_another_tree_keeps_what_is_known_of_children_it_does_not_have():
    """So that an engine whose tree became a chain still knows what second children are worth."""
    state = Engine(controller(), PROSE, 4, seed=1).run(500).controlled.state()
    second = DraftController(TokenTree.chain(7), [7] * BATCHES, [7] * BATCHES, [7])
    assert not second.restore(state)
    workload, acceptance = second.state().usual_acceptance()
    assert workload == "greedy"
    assert acceptance.probability(1) == pytest.approx(PROSE[1], abs=0.04)


def test_restarts_and_pauses_do_not_forget_what_the_next_tree_is_made_from():
    """An engine that served a few requests only must not undo what many taught."""
    few = Engine(controller(), CODE).run(100).controlled.state()
    assert few.usual_acceptance() is None
    state = Engine(controller(), CODE, 4).run(500).controlled.state()
    taught, vector = state.usual_acceptance()
    for trees in (10.0, None):
        restored = controller()
        assert restored.restore(state)
        if trees:
            restored._known.acceptance["greedy"].fade(trees)
        state = restored.state()
    assert state.acceptance["greedy"].trees <= 10.0
    workload, acceptance = state.usual_acceptance()
    assert workload == taught
    assert acceptance.probability(1) == pytest.approx(vector.probability(1), abs=0.05)


def seen_times(*steps: tuple[int, int, float], times: int = 6) -> StepTimes:
    """Times of which each of these steps (drafts, batch size, seconds) was seen so often."""
    found = StepTimes()
    for step in steps:
        for _ in range(times):
            found.add(*step)
    return found


def test_times_are_fitted_to_like_batches():
    """One step that waited for something moves a fitted time by a percent at most."""
    times = seen_times((15, 8, 2.0))
    times.add(15, 8, 50.0)
    assert times.known(15, 8) == pytest.approx(2.0, rel=0.01)
    assert times.known(15, 16) is None
    assert times.known(7, 8) is None
    times.forget(15, 9)
    assert times.known(15, 8) is None


def test_steps_that_seem_to_take_no_time_are_no_error():
    """A clock's error, such as where a step's drafting was counted to the step before."""
    times = seen_times(*[(0, 1, 0.0), (15, 1, 0.0)] * 2, times=80)
    assert 0 < times.known(0, 1) == pytest.approx(times.known(15, 1))


def test_prices_are_told_apart():
    """Steps read prompts of any length, over contexts of any length, in batches of any size."""
    rng, times = np.random.default_rng(0), StepTimes()

    def seconds(drafts, batch, prompts, context):
        drafted = drafts > 0
        of_rows = batch * (0.1 + 0.01 * drafts)
        of_prompts = (0.004 + 0.001 * drafted) * prompts
        return 2.0 + drafted + of_rows + of_prompts + (1e-4 + 2e-4 * drafted) * context

    for step in range(192):
        drafts, batch = (0, 3, 15)[step % 3], int(rng.integers(4, 8))
        prompts = int(rng.integers(0, 500)) * int(rng.integers(2))
        context = int(rng.integers(0, 4000))
        took = seconds(drafts, batch, prompts, context) * rng.lognormal(0, 0.02)
        times.add(drafts, batch, took * (4 if step % 50 == 49 else 1), prompts, context)
    for drafts in (0, 3, 15):
        for context in (500, 6000):
            expected = seconds(drafts, 5, 0, context)
            assert times.known(drafts, 5, context) == pytest.approx(expected, rel=0.04)
    assert times.prompt_price(0) == pytest.approx(0.004, rel=0.1)
    assert times.prompt_price(15) == pytest.approx(0.005, rel=0.1)


def test_steps_with_fewer_drafts_take_no_longer():
    speeds = Speeds(TREE)
    speeds.acceptance["greedy"].add(rejected(100))
    speeds.times = seen_times((0, 8, 2.5), (3, 8, 1.0), (7, 8, 3.0), (15, 8, 2.0))
    ranges = speeds.ranges(8, "greedy", [0, 3, 7, 15])
    tokens = speeds.tokens("greedy")
    times = {drafts: tokens[drafts] / slow for drafts, (slow, fast) in ranges.items()}
    assert times == pytest.approx({0: 1.0, 3: 1.0, 7: 2.0, 15: 2.0}, rel=0.01)


def test_other_steps_bound_the_time_of_those_that_were_not_seen():
    times = seen_times((15, 1, 0.2), (0, 1, 0.08), (15, 2, 0.3))
    # As many tokens as one tree, and no draft; no less than one token alone.
    assert times.bounds(0, 16) == pytest.approx((0.08, 0.2), rel=0.01)
    # Half of the trees at batch 2 by their share at least, and one tree of twice the tokens.
    assert times.bounds(7, 2) == pytest.approx((0.15, 0.2), rel=0.01)
    assert times.bounds(31, 2) == (pytest.approx(0.3, rel=0.01), inf)


def test_dynamic_trees_are_expected_as_they_were_accepted():
    """Without a word about the acceptance of children, which are not the engine's tree's."""
    rng, trees = np.random.default_rng(0), 4000
    lengths = rng.integers(0, 3, trees)
    nodes = np.full((trees, 2), -1)
    nodes[lengths > 0, 0] = 1 + 2 * rng.integers(0, 2, (lengths > 0).sum())  # 1 or 3
    nodes[lengths > 1, 1] = 4
    fading = FadingAcceptance(TREE)
    before = fading.state()
    fading.add(TreeCounts.of_paths(TREE, [paths_of(TREE, nodes, np.full(trees, 6), True)]))
    expected = fading.expected_tokens()
    shares = np.bincount(nodes[nodes > 0], minlength=6)[1:6] / trees
    np.testing.assert_allclose(expected[:6], np.cumsum([1.0, *shares]), rtol=0.02)
    assert (np.diff(expected) >= 0).all()
    assert len(expected) == TREE.size
    assert expected[-1] < expected[5] + 1.0  # what was never scored
    assert fading.trees == trees
    assert fading.state() == before  # nothing about a static tree was learned


def test_static_and_dynamic_trees_are_expected_by_their_shares():
    static, dynamic = [paths_of(TREE, np.full((100, 1), node), np.full(100, TREE.size), is_dynamic)
                       for node, is_dynamic in ((1, False), (2, True))]  # fmt: skip
    expected = []
    for paths in ([static], [dynamic], [static, dynamic]):
        fading = FadingAcceptance(TREE)
        fading.add(TreeCounts.of_paths(TREE, paths))
        expected.append(fading.expected_tokens()[2])
    assert expected[2] == pytest.approx((expected[0] + expected[1]) / 2, rel=0.1)
