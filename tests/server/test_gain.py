"""The gain on ``/metrics`` is the one that a client finds beside plain vLLM, fast target or slow.

Steps take simulated time (`tests.support.step_clock`). A client and the engine read one clock, so
nothing depends on how fast or busy this machine is.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.models import prompts
from tests.support.serving import DRAFT, OPTIONS, ROOT, Server, environment
from tests.support.step_clock import MACHINES, VARIABLE, WHICH, StepClock

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ONE, DIFFERENT = prompts(1), prompts(4)
SLOW, FAST = MACHINES
TIMED = "--scheduler-cls=tests.support.timed_scheduler.TimedScheduler"
TREES = f'--speculative-config={{"method": "sequoia", "model": "{DRAFT}", "tree": {{"size": 16}}}}'
# Requests at once, and tokens of an answer.
LOADS = {
    "one": (ONE, 100), "four alike": (ONE * 4, 100), "short": (ONE, 8),
    "four clients": (DIFFERENT, 100),
}  # fmt: skip
HALF_LIFE = 5.0  # seconds, of the metric
LEARNING = 300  # tokens of an answer: more steps than drafts that gain nothing may last


class Timed:
    def __init__(self, folder: Path, name: str, machine: str, *options: str) -> None:
        file = folder / f"{name}.clock"
        self.clock = StepClock(file)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {VARIABLE: str(file), WHICH: machine, "PYTHONPATH": path}
        variables = environment(forks=True) | own
        log = folder / f"{name}.log"
        self.server = Server(
            log, *OPTIONS, TIMED, *options, variables=variables, start_deadline=500
        )

    def answer(self, texts: Sequence[str], tokens: int) -> tuple[list[str], float, float]:
        """Answers, how long the client waited for the last of them, and `StepClock.tokens`."""
        begun, before = self.clock.now, self.clock.tokens
        self.clock.send(len(texts))
        completion = self.server.complete(
            prompt=texts, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        seconds = self.clock.now - begun
        return [one.text for one in completion.choices], seconds, self.clock.tokens - before


class Compared:
    """What a client saw of two servers lately, with the metric's half-life."""

    def __init__(self, plain: Timed, trees: Timed) -> None:
        self._plain, self._trees = plain, trees
        self._took = self._plain_took = self._in_steps = 0.0
        self.seconds: list[tuple[float, float]] = []  # of an answer, and of plain's

    def serve(self, texts: Sequence[str], tokens: int, seconds: float) -> list[float]:
        """Asks for so long, and until the engine reports its gain, which is returned."""
        right, plain_seconds, plain_tokens = self._plain.answer(texts, tokens)
        end = self._trees.clock.now + seconds
        reported: list[float] = []
        while self._trees.clock.now < end or not reported:  # an idle engine reports nothing
            answers, took, received = self._trees.answer(texts, tokens)
            assert answers == right
            kept = 0.5 ** (took / HALF_LIFE)
            self._took = kept * self._took + took
            self._plain_took = kept * self._plain_took + plain_seconds
            self._in_steps = kept * self._in_steps + plain_seconds * received / plain_tokens
            self.seconds.append((took, plain_seconds))
            reported = self._trees.server.metric("sequoia:measured_speedup")
        return reported

    @property
    def gain(self) -> float:
        """What a client sees that waits for the last of its answers."""
        return self._plain_took / self._took

    @property
    def gain_in_steps(self) -> float:
        """The mean of the requests that ran in each step."""
        return self._in_steps / self._took


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Timed]]:
    folder = tmp_path_factory.mktemp("gain")
    found = {
        "plain": Timed(folder, "plain", SLOW),
        SLOW: Timed(folder, "slow", SLOW, TREES),
        FAST: Timed(folder, "fast", FAST, TREES),
    }
    with found["plain"].server, found[SLOW].server, found[FAST].server:
        yield found


def test_the_reported_gain_is_a_clients(servers: dict[str, Timed]) -> None:
    """One engine under four loads, one after the other.

    Each lasts for five half-lives, so that little of the one before is left. Four different answers
    end one after the other. Their client waits for the last, with ever fewer requests beside it.
    The metric tells the mean of those that run, so it is higher: the difference is what is counted
    here in the scheduler, by step.
    """
    compared = Compared(servers["plain"], servers[SLOW])
    found, in_steps, waited = {}, {}, {}
    for name, (texts, tokens) in LOADS.items():
        [found[name]] = compared.serve(texts, tokens, 5 * HALF_LIFE)
        in_steps[name], waited[name] = compared.gain_in_steps, compared.gain
    print(found, in_steps, waited)
    assert min(waited.values()) > 1.1
    for name, (texts, _) in LOADS.items():
        rel = 0.03 if len(texts) == 1 else 0.05
        assert found[name] == pytest.approx(in_steps[name], rel=rel), name
        if texts is DIFFERENT:
            assert waited[name] < in_steps[name]
        else:  # they end together
            assert found[name] == pytest.approx(waited[name], rel=rel), name


@pytest.mark.parametrize("load", ["one", "four alike"])
def test_drafts_that_gain_nothing_end(servers: dict[str, Timed], load: str) -> None:
    """A level of the draft takes as long as the target, so no tree pays: but trials go on. What
    they find told is drafted without it, and may gain a little."""
    fast = servers[FAST]
    texts, tokens = LOADS[load]
    fast.answer(texts, LEARNING)
    compared = Compared(servers["plain"], fast)
    [reported] = compared.serve(texts, tokens, 4 * HALF_LIFE)
    assert fast.server.metric("sequoia:drafted_nodes") == [0.0]
    [trees] = fast.server.metric("sequoia:trees_total")
    took, plain_took = map(sum, zip(*compared.seconds, strict=True))
    print(f"{load}: {took:.2f} s, plain {plain_took:.2f}, {trees:.0f} trees, metric {reported:.3f}")
    assert trees > 0
    assert 0.85 * plain_took < took < 1.05 * plain_took
