"""What the controller decides, notes and probes, in steps of which all is known."""

from types import SimpleNamespace

import numpy as np
import pytest

from sequoia_vllm.adaptation.controller import DraftController, _Probe
from sequoia_vllm.adaptation.step import Step
from sequoia_vllm.metrics.counts import TreeCounts, paths_of
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE

TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3, 3))
SIZES = [1, 3, 7]


def controller(batches: int = 9, drafts: int = 7, more: float = 0.1, **given) -> DraftController:
    """Plain steps take a second, and each draft ``more``."""
    given = {
        "times": lambda sizes: 1.0 + more * np.array(sizes)[:, None] + np.zeros(batches)
    } | given
    return DraftController(TREE, [drafts] * batches, [7] * batches, SIZES, **given)


def paths(trees: int, drafts: int, *accepted: int) -> bytes:
    """Trees of which these nodes were accepted."""
    nodes = np.full((trees, TREE.depth), -1)
    nodes[:, : len(accepted)] = accepted
    return paths_of(TREE, nodes, np.full(trees, drafts + 1)).tobytes()


def serve(
    controlled: DraftController, steps: int, more: float, *accepted: int, **drafted
) -> list[int]:
    """Steps of one request at a hundredth of a second and ``more``; what was drafted in each.

    ``drafted``: of steps that score drafts.
    """
    history: list[int] = []
    for _ in range(steps):
        scored = history[-1] if history else 0
        taken = [node for node in accepted if node <= scored]
        drafts = controlled.lookup[1]
        seen = {"seconds": 0.01 * (1 + more * scored), "before": scored, "gained": len(taken)}
        if scored:
            seen |= {"paths": paths(1, scored, *taken)} | drafted
        controlled.observe(Step(batch_size=1, drafts=drafts, workload="greedy", **seen))
        history.append(drafts)
    return history


def learn(controlled: DraftController, *accepted: int) -> None:
    """Counts many trees of which these nodes were accepted."""
    controlled._acceptance["greedy"].add(TreeCounts.from_bytes(TREE, paths(9000, 7, *accepted)))


def unlucky() -> DraftController:
    """Whose drafts were never accepted."""
    controlled = controller(more=0.02)
    learn(controlled)
    return controlled


def runs_of(history: list[int]) -> list[tuple[int, int]]:
    """Numbers of drafts and how often each stood in a row."""
    ends = [*np.flatnonzero(np.diff(history)) + 1, len(history)]
    return [
        (history[end - 1], int(end - start)) for start, end in zip([0, *ends], ends, strict=False)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_at_first_each_batch_size_drafts_what_is_fastest_by_the_times_given(seed):
    """Drafting must gain two hundredths; more drafts take no less than fewer."""
    rng, batches = np.random.default_rng(seed), 9
    schedule = [0, *rng.integers(0, 9, batches - 1).clip(max=7).tolist()]
    most = [7, *rng.integers(0, 8, batches - 1).tolist()]
    sizes = sorted({0, *SIZES, *schedule})
    table = np.cumsum(rng.exponential(0.08, (len(sizes), batches)), axis=0) + 1.0
    table *= rng.choice([1.0, 1.3], table.shape, p=[0.9, 0.1])
    controlled = DraftController(TREE, schedule, most, SIZES, lambda _: table)
    tokens = np.cumsum(TREE.values(REFERENCE_ACCEPTANCE))
    for batch in range(1, batches):
        speeds = {
            drafts: tokens[drafts] / table[place:, batch].min()
            for place, drafts in enumerate(sizes)
            if drafts in {0, *SIZES, schedule[batch]} and drafts <= most[batch]
        }
        best = max(speeds, key=speeds.__getitem__)
        expected = best if speeds[best] > np.exp(0.02) * speeds[0] else 0
        assert controlled.lookup[batch] == controlled.decided(batch) == expected
    assert controlled.lookup[0] == 0


@pytest.mark.parametrize(("gain", "drafts"), [(0.005, 0), (0.015, 0), (0.025, 1)])
def test_drafting_begins_where_it_gains_two_hundredths(gain, drafts):
    tokens = 1 + REFERENCE_ACCEPTANCE.probability(0)
    table = np.array([[1.0, 1.0], [tokens, tokens]]) / np.exp([[0], [gain]])
    assert DraftController(TREE, [1, 1], [1, 1], [1], lambda _: table).decided(1) == drafts


@pytest.mark.parametrize(("gain", "drafts"), [(0.05, 1), (0.075, 0)])
def test_drafting_ends_where_plain_steps_gain_more_than_trees_may_have_been_unlucky(gain, drafts):
    """By one and a half deviations. Also of a single draft."""
    tokens = 1 + REFERENCE_ACCEPTANCE.probability(0)
    table = np.array([[1.0, 1.0], [tokens, tokens]]) * np.exp([[0], [gain]])
    controlled = DraftController(TREE, [1, 1], [1, 1], [1], lambda _: table)
    controlled._chosen[:], controlled._chance = 1, lambda: 0.04
    controlled._choose(slice(1, None))
    assert controlled.decided(1) == drafts


@pytest.mark.parametrize(("doubt", "drafts"), [(0.03, 1), (0.06, 1), (0.08, 3)])
def test_numbers_that_may_be_faster_are_measured(doubt, drafts):
    """3 drafts seem to lose a twentieth. Doubts count one and a half times, less 3 hundredths."""
    tokens = np.cumsum(TREE.values(REFERENCE_ACCEPTANCE))[[0, 1, 3]]
    table = (tokens * np.exp([1.0, 0.0, 0.05]))[:, None] + np.zeros(2)
    controlled = DraftController(TREE, [1, 1], [3, 3], [1, 3], lambda _: table)
    assert controlled.decided(1) == 1
    controlled._times.seen[:] = 1
    controlled._times.doubts = lambda *_: np.array([0.0, 0.0, doubt])
    controlled._choose(slice(1, None), 1)
    assert controlled.decided(1) == drafts


def test_steps_are_timed_where_their_number_of_drafts_is_known():
    """Between two numbers a step's own drafting is replaced by the usual share."""
    controlled = controller()
    controlled._times.add(3, 2, 9.0, context=9000)
    timed, read, gained = [], [], []
    controlled._times.add = lambda *step: timed.append(step)
    controlled._prompts.add = lambda _, *told: read.append(told)
    controlled._gain = SimpleNamespace(value=1.5, add=lambda _, *told: gained.append(told))
    known = controlled._times.seconds
    assert controlled.speedup is None

    def observe(drafts: int, seconds: float | None, trees: int, **more) -> list:
        timed.clear()
        scored = more.get("before", drafts)
        seen = paths(trees, scored) if trees else b""
        controlled._note(Step(2, drafts, seconds, "greedy", seen, context=50, **more))
        return timed

    assert observe(3, 2.0, 2, before=0, drafting=0.5) == [(0, 2, 1.5, 50)]
    assert observe(0, 2.0, 2, before=3) == []  # 3 drafts' share is not known yet
    assert observe(3, 2.0, 2, drafting=0.5) == [(3, 2, 2.0, 50)]
    assert read[-1] == (2.0, pytest.approx(known(3, 2, 50)), 0.25)
    assert gained[-1] == (2.0, 2, controlled._times, 0.25)
    assert controlled.speedup == 1.5
    assert observe(0, 1.5, 1, before=3) == [(3, 2, 2.0, 50)]
    assert observe(1, 1.5, 1, before=3) == []  # it may have grown some in time that is not told
    assert observe(1, 2.0, 1, before=3, drafting=0.5) == [(3, 2, 2.0, 50)]
    assert observe(3, 2.0, 2, drafting=1.0) == [(3, 2, 2.0, 50)]
    assert observe(3, 2.0, 2) == [(3, 2, 2.0, 50)]
    assert read[-1][2] == pytest.approx(0.25 + 0.02 * 0.25)
    observe(7, 2.0, 2, drafting=1.99)
    assert read[-1][2] == 0.9
    assert observe(7, 0.0, 2) == [(7, 2, 0.0, 50)]
    assert read[-1][2] == 0.9
    assert observe(1, 0.8, 2, drafting=0.2) == [(1, 2, 0.8, 50)]
    assert observe(0, 0.9, 2, before=1) == [(1, 2, pytest.approx(1.2), 50)]
    assert observe(0, 2.0, 0, drafting=0.5) == [(0, 2, 2.0, 50)]
    assert (read[-1][2], gained[-1][1]) == (0.0, 0)
    count = len(read)
    assert observe(3, None, 2) == observe(3, 2.0, 0) == observe(3, 2.0, 2, prompts=5) == []
    assert len(read) == len(gained) == count + 2
    assert observe(3, 2.0, 2, is_told=True) == []
    assert (len(read), len(gained)) == (count + 2, count + 3)


def test_tokens_count_as_far_as_requests_have_trees_and_receive_them():
    """16 received tokens count before the first. One accepted node in three is behind an end."""
    controlled = controller()
    assert controlled._share() == 1.0
    for _ in range(10):
        controlled._note(Step(4, 3, None, "greedy", paths(3, 3, 1, 3), prompts=1, gained=4))
    controlled._note(Step(4, 3, None, "greedy", b"", before=0))  # none was scored
    controlled._note(Step(4, 3, None, "greedy", paths(1, 3), before=1))  # of another number
    controlled._note(Step(4, 3, None, "greedy", b""))  # nothing says that there was a tree
    controlled._count()
    with_trees = 0.75 + 0.25 * 0.98**10
    weight = 0.5 ** (31 / 1000)
    received, accepted = weight * (16 + 40), weight * 16 + 60
    assert controlled._share() == pytest.approx(with_trees * received / accepted)
    expected = controlled._acceptance["greedy"].expected_tokens()
    tokens = 1 + controlled._share() * (expected[[0, 1, 3, 7]] - 1)
    assert controlled._tokens() == pytest.approx(tokens)
    controlled._note(Step(2, 3, None, "greedy", paths(9, 3)))
    assert controlled._with_trees == pytest.approx(with_trees + 0.02 * (1 - with_trees))


def test_contexts_are_the_mean_of_steps_of_which_a_hundred_count():
    controlled, contexts = controller(), np.random.default_rng(0).integers(0, 999, 150).tolist()
    for number, context in enumerate(contexts):
        controlled.observe(Step(2, 0, None, "greedy", context=context))
        if number < 100:
            mean = np.mean(contexts[: number + 1]) / 2
        else:
            mean += (context / 2 - mean) / 100
        assert controlled._context == pytest.approx(mean)


@pytest.mark.parametrize(
    ("more", "drafted", "steps", "idle"),
    [
        (0.02, {}, 25, [31, 64, 128, 128]),
        (0.1, {}, 4, [31, 64, 128, 128]),
        (0.2, {}, 4, [31, 87, 128, 128]),
        (1.0, {}, 4, [31, 560]),
        (1.0, {"prompts": 9}, 25, [31, 64, 128, 128]),
        (1.0, {"is_told": True}, 25, [31, 64, 128, 128]),
        (1.0, {"seconds": None}, 25, [31, 64, 128, 128]),
    ],
)
def test_what_is_not_drafted_is_probed_more_and_more_seldom(more, drafted, steps, idle):
    """A probe ends after 3 trees, or 24 where drafts may pay. The next one waits until what it lost
    is a two-hundredth of the time, as far as that is known."""
    controlled = unlucky()
    first, *runs = runs_of(serve(controlled, 800, more, **drafted))
    assert first == (7, 1)
    assert [length for drafts, length in runs if drafts == 0][: len(idle)] == idle
    assert {run for run in runs[:-1] if run[0] > 0} == {(1, steps)}
    assert controlled.decisions == 1


def test_the_next_probe_is_soon_where_something_was_drafted_in_between():
    controlled = unlucky()
    assert runs_of(serve(controlled, 400, 0.02))[5] == (0, 128)
    learn(controlled, 1, 3, 6)
    assert serve(controlled, 20, 0.02, 1, 3, 6)[-1] == 7
    learn(controlled)
    assert runs_of(serve(controlled, 60, 0.02))[:3] == [(7, 6), (0, 31), (1, 23)]


def test_probes_lose_what_is_longer_than_the_usual_time_of_the_same_tokens():
    """A two-hundredth of the time may be lost."""
    controlled = controller(times=lambda sizes: 1.0 + 0.1 * np.outer(sizes, np.arange(9)))
    controlled.observe(Step(2, 7, None, "greedy"))
    assert controlled._spare == 0.0
    controlled.observe(Step(2, 7, 1.6, "greedy", paths(2, 7), context=50))
    assert controlled._spare == pytest.approx(0.005 * 1.6)
    place = [0, *SIZES].index(controlled.decided(2))
    usual, tokens = controlled._times.seconds(controlled.decided(2), 2, 50), controlled._tokens()
    controlled._go_on(_Probe(0), Step(2, 0, 3.0, "greedy", gained=3, context=50), 0)
    lost = 3.0 - usual * 2.5 / tokens[place]
    assert controlled._spare == pytest.approx(0.005 * 1.6 - lost)


def test_trees_shrink_after_preemptions_until_it_is_calm_or_they_are_not_the_cause():
    def most(steps: int, preempted: int) -> list[int]:
        seen = []
        for _ in range(steps):
            controlled.observe(Step(1, 1, None, "greedy", preempted=preempted))
            seen.append(controlled._most[1])
        return seen

    controlled = DraftController(TREE, [1, 1], [1, 1], [1])
    assert runs_of(most(17, 1) + most(1010, 0)) == [(1, 16), (0, 1001), (1, 10)]
    controlled = DraftController(TREE, [1, 1], [1, 1], [1])
    assert runs_of(most(100, 1)) == [(1, 16), (0, 17), (1, 67)]


def test_a_probe_ends_once_one_draft_is_decided():
    controlled = DraftController(TREE, [1, 1], [1, 1], [1])
    controlled._probe = _Probe(1)
    controlled.observe(Step(1, 1, None, "greedy"))
    assert controlled.decided(1) == 1
    assert controlled._probe is None


@pytest.mark.parametrize("host_bound", [False, True])
def test_where_all_steps_read_prompts_drafts_save_such_steps(host_bound):
    """Steps take ten times as long, which is known of these batch sizes alone."""
    controlled = controller(more=2.0, host_bound=host_bound)
    assert controlled._prompts.host_bound == host_bound
    assert set(controlled.lookup[1:]) == {0}
    for _ in range(100):
        controlled.observe(Step(1, 0, 10.0, "greedy", prompts=9))
    assert controlled.decided(1) > 0
    assert {controlled.decided(batch) for batch in range(2, 9)} == {0}


def test_plain_steps_are_probed_until_their_time_is_known():
    runs = runs_of(serve(controller(), 1000, 0.05, 1, 3, 6))
    assert runs[:3] == [(3, 5), (7, 43), (0, 4)]
    assert [run for run in runs[3:] if run[0] == 0] == [(0, 4)] * 2
    begins = np.cumsum([steps for _, steps in runs])[[drafts == 7 for drafts, _ in runs]][:-1]
    assert (begins % 48).tolist() == [0, 0, 0]


def test_plain_steps_are_probed_where_one_draft_is_decided():
    controlled = DraftController(TREE, [1, 1], [1, 1], [1])
    assert runs_of(serve(controlled, 60, 0.05, 1))[:2] == [(1, 48), (0, 4)]


def test_a_decision_is_logged_with_both_speeds(caplog):
    caplog.set_level("INFO", "vllm.sequoia.adaptation")
    serve(unlucky(), 400, 0.25)
    serve(controller(drafts=0), 400, 0.05, 1, 3, 6)
    off, on = caplog.messages
    assert off == "Sequoia: speculation off at batch 1 (plain 100 tokens/s, with drafts 80)"
    assert on == "Sequoia: 7 drafts at batch 1 (plain 100 tokens/s, with drafts 296)"


def test_each_octave_of_batch_sizes_is_logged_by_itself_where_the_schedule_was_left(
    monkeypatch, caplog
):
    now = [0.0]
    monkeypatch.setattr("sequoia_vllm.adaptation.controller.time.monotonic", lambda: now[0])
    caplog.set_level("INFO", "vllm.sequoia.adaptation")
    controlled = DraftController(TREE, [7, 7, 7, 7, 0, 0, 0, 0, 7], [7] * 9, SIZES)
    learn(controlled)
    for batch_size in (1, 2, 3, 1, 5, 8):
        for _ in range(40):
            controlled.observe(Step(batch_size, 0, 0.01, "greedy"))
        now[0] += 60.0
    assert [text.split(" (")[0] for text in caplog.messages] == [
        f"Sequoia: speculation off at batch {batch_size}" for batch_size in (1, 2, 8)
    ]


@pytest.mark.parametrize(
    ("timed", "shown"), [([], 1), ([1], 1), ([3], 3), ([7], 7), ([1, 3], 3), ([1, 7], 1)]
)
def test_speed_with_drafts_is_logged_of_the_fastest_that_were_timed(timed, shown, caplog):
    """Where nothing is drafted. Of the fewest drafts if none were timed."""
    caplog.set_level("INFO", "vllm.sequoia.adaptation")
    controlled = unlucky()
    controlled.observe(Step(4, 0, 0.01, "greedy"))
    for drafts in timed:
        controlled._times.add(drafts, 4, {1: 0.02, 3: 0.016, 7: 0.04}[drafts])
    controlled._say(Step(4, 0, None, "greedy"))
    per_token = dict(zip([0, *SIZES], controlled._seconds_per_token(slice(4, 5)), strict=True))
    plain, with_drafts = (4 / per_token[drafts].item() for drafts in (0, shown))
    [text] = caplog.messages
    assert text.endswith(f"(plain {plain:.0f} tokens/s, with drafts {with_drafts:.0f})")


def test_a_probe_of_plain_steps_ends_though_a_worker_goes_on_drafting():
    controlled, asked = controller(), []
    for _ in range(90):
        controlled.observe(Step(1, 7, 1.2, "greedy", paths(1, 7, 1, 3, 6), gained=3))
        asked.append(controlled.lookup[1])
    assert np.flatnonzero(np.array(asked) == 0).tolist() == list(range(47, 79))


@pytest.mark.parametrize(
    ("batch_size", "octave"), [(1, {1}), (3, {2, 3}), (4, {4, 5, 6, 7}), (8, {8})]
)
def test_most_decisions_are_for_the_octave_of_the_batch_size(batch_size, octave):
    controlled = controller()
    controlled.observe(Step(batch_size, 7, None, "greedy"))  # a new batch size: for all
    learn(controlled)
    for _ in range(4):
        assert min(controlled.lookup[1:]) > 0
        controlled.observe(Step(batch_size, 7, None, "greedy"))
    assert {batch for batch in range(1, 9) if controlled.decided(batch) == 0} == octave
    assert controlled.state().lookup == [0, *map(controlled.decided, range(1, 9))]


def test_decisions_are_more_frequent_at_first_and_in_probes():
    """Every eighth one is for all batch sizes."""
    controlled, decided, of_all = unlucky(), [], []
    decide, choose = controlled._decide, controlled._choose

    def note(batches: slice, *told) -> None:
        if batches == slice(1, None):
            of_all.append(controlled._steps)
        choose(batches, *told)

    controlled._decide = lambda *told: (decided.append(controlled._steps), decide(*told))
    controlled._choose = note
    for _ in range(3):
        controlled.observe(Step(1, 0, 0.01, "sampled"))
    serve(controlled, 137, 0.02)  # it probes from the 35th and the 124th step on
    assert decided[:16] == [1, *range(4, 64, 4)]
    assert decided[16:] == [68, 76, 84, 92, 100, 108, 116, 124, 128, 132, 136, 140]
    assert of_all == [1, 4, 36, 76, 132]
    assert controlled.decisions == 2  # fewer drafts, and none
    controlled.take_times([(0, 1, 0.01), (7, 1, 0.05)])
    assert controlled.decisions == 3
