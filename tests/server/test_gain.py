"""The gain on ``/metrics`` is the one that a client finds beside plain vLLM.

Steps take simulated time (`tests.support.step_clock`). A client and the engine read one clock, so
nothing depends on how fast or busy this machine is.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import prompts
from tests.support.serving import DRAFT, OPTIONS, ROOT, Server, environment
from tests.support.step_clock import VARIABLE, StepClock

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

PROMPTS = prompts(1)
TIMED = "--scheduler-cls=tests.support.timed_scheduler.TimedScheduler"
TREES = f'--speculative-config={{"method": "sequoia", "model": "{DRAFT}", "tree": {{"size": 16}}}}'
# Requests at once, and tokens of an answer.
LOADS = [(1, 100), (4, 100), (1, 8)]
HALF_LIFE = 5.0  # seconds, of the metric


class Timed:
    def __init__(self, folder: Path, name: str, *options: str) -> None:
        file = folder / f"{name}.clock"
        self.clock = StepClock(file)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = environment(forks=True) | {VARIABLE: str(file), "PYTHONPATH": path}
        log = folder / f"{name}.log"
        self.server = Server(log, *OPTIONS, TIMED, *options, variables=variables)

    def answer(self, texts: list[str], tokens: int) -> tuple[list[str], float]:
        """Answers of so many tokens, and how long the client waited for them."""
        begun = self.clock.now
        completion = self.server.complete(
            prompt=texts, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in completion.choices], self.clock.now - begun


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Timed, Timed]]:
    folder = tmp_path_factory.mktemp("gain")
    plain, trees = Timed(folder, "plain"), Timed(folder, "trees", TREES)
    with plain.server, trees.server:
        yield plain, trees


def test_the_reported_gain_is_a_clients(servers: tuple[Timed, Timed]) -> None:
    """One engine under three loads, one after the other.

    Each lasts for five half-lives, so that little of the one before is left. Requests at once are
    alike and end together: a client that waits for the slowest of several sees less than their
    mean, which the metric tells.
    """
    plain, trees = servers
    plain_took = took = 0.0
    found, expected = {}, {}
    for load in LOADS:
        at_once, tokens = load
        right, plain_seconds = plain.answer(PROMPTS * at_once, tokens)
        end = trees.clock.now + 5 * HALF_LIFE
        reported: list[float] = []
        while trees.clock.now < end or not reported:  # an idle engine reports nothing
            answers, seconds = trees.answer(PROMPTS * at_once, tokens)
            assert answers == right
            kept = 0.5 ** (seconds / HALF_LIFE)
            plain_took = kept * plain_took + plain_seconds
            took = kept * took + seconds
            reported = trees.server.metric("sequoia:measured_speedup")
        [found[load]], expected[load] = reported, plain_took / took
    print(found, expected)
    assert found == pytest.approx(expected, rel=0.03)
    assert min(expected.values()) > 1.1
