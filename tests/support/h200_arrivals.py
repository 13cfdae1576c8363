"""Arrivals at an H200's prices: what a controller loses of what the fastest drafts would bring.

Prices are those of docs/notebook/2026-11-27-h200.md: a target of 7.1B, an EAGLE-3 head whose first
drafts are accepted in 0.40 of cases. The acceptance of later children is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.adaptation.state import FadingAcceptance
from sequoia_vllm.adaptation.step import Step
from sequoia_vllm.adaptation.step_times import assumed_seconds
from sequoia_vllm.library.tree_library import find_vector
from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import TokenTree, optimize_tree
from tests.support.open_loop import Machine, Request, Server, poisson, walks_of

SIZES = [1, 3, 8, 15, 31]
HEAD = (0.40, 0.13, 0.07, 0.045, 0.03, 0.025, 0.02, 0.015)
MOST_RUNNING = 32
ANSWER = 64  # tokens
_KNEE_GPU, _DOUBT_GPU = 150.0, 0.6  # as `engine.core.adapting` assumes where nothing is measured
READING = 0.015  # seconds of a step that reads a prompt, 0.002 more with drafts: the host bounds it
_ROWS = (1, 8, 32, 64, 96, 128, 160, 256, 512, 1024)
_SECONDS = (0.0045, 0.0046, 0.0048, 0.0051, 0.0055, 0.00595, 0.0063, 0.0079, 0.013, 0.024)


@cache
def tree() -> TokenTree:
    """The tree that is drafted: 31 nodes by the acceptance that is assumed where none is known."""
    return optimize_tree(find_vector("shipped"), 32, 5)


class H200(Machine):
    """Seconds of steps as measured."""

    def seconds(
        self, depth: int, drafts: int, trees: int, rows: int, prompts: int, context: int
    ) -> float:
        """Interpolated over rows; each request adds 12 us for its context and sampling."""
        trees = max(trees, 1)
        seconds = float(np.interp(rows, _ROWS, _SECONDS)) + 1.2e-5 * trees + 7e-5
        seconds += self.drafting(depth, drafts, trees, 0)
        if prompts:
            seconds = max(seconds + 1e-3, READING + 2e-3 * (drafts > 0))
        return seconds

    def drafting(self, depth: int, drafts: int, trees: int, prompts: int) -> float:
        """A pass for each level."""
        if drafts == 0:
            return 1.1e-4
        trees = max(trees, 1)
        passes = 2.35e-4 * depth * (1 + 0.006 * trees)
        return 6e-5 + passes + 6e-7 * trees * drafts + 1.5e-3 * (prompts > 0)


MACHINE = H200(noise=0.03, disturbed=0.01)


def decode_seconds(drafts: int, batch_size: int, machine: Machine = MACHINE) -> float:
    """Seconds of a step without prompts."""
    depth = int(np.maximum.accumulate(tree().depths)[drafts])
    return machine.seconds(depth, drafts, batch_size, batch_size * (1 + drafts), 0, 0)


def tokens_of(drafts: int, acceptance: tuple[float, ...] = HEAD) -> float:
    """Tokens that a request gets in a step, in the mean."""
    walks = walks_of(tree(), acceptance)
    return 1 + float(((walks >= 0) & (walks <= drafts)).sum(axis=1).mean())


def table(error: float, rng: np.random.Generator) -> np.ndarray:
    """Times as measured at start, by drafts (0, then `SIZES`) and batch size from 0 on.

    Each batch size that has a graph is wrong by ``error`` (a standard deviation), all by 3 %.
    """
    graphs, batches = [1, 2, 4, 8, 16, 32], np.arange(MOST_RUNNING + 1)
    common = rng.normal(1, 0.03)
    return np.stack(
        [
            np.interp(
                batches,
                graphs,
                [decode_seconds(drafts, b) * common * rng.normal(1, error) for b in graphs],
            )
            for drafts in [0, *SIZES]
        ]
    )


def controller(times: np.ndarray | None) -> DraftController:
    """A controller as on GPUs: these times were measured at start; None: none were."""
    whole = [0] + [SIZES[-1]] * MOST_RUNNING
    assumed = partial(assumed_seconds, tree(), MOST_RUNNING, knee=_KNEE_GPU)
    controlled = DraftController(tree(), whole, whole, SIZES, assumed, _DOUBT_GPU, host_bound=True)
    if times is not None:
        controlled.take_times(
            [
                (drafts, batch_size, float(times[place, batch_size]))
                for place, drafts in enumerate([0, *SIZES])
                for batch_size in range(1, MOST_RUNNING + 1)
            ]
        )
    return controlled


@dataclass(frozen=True)
class LoggedStep:
    """A step of a trace."""

    end: float  # seconds since the trace began
    batch_size: int
    drafts: int
    prompts: int
    seconds: float


def serve(
    lookup: Sequence[int], observe: Callable[[Step], None] | None, trace: list[Request], seed: int
) -> list[LoggedStep]:
    """Serves a trace with drafts by batch size from ``lookup``; returns its steps."""
    steps: list[LoggedStep] = []
    before = -1

    def note(*, drafts: int, is_steady: bool, **seen: Any) -> None:
        nonlocal before
        taken = server.clock, seen["batch_size"], drafts, seen["prompts"], seen["seconds"]
        steps.append(LoggedStep(*taken))
        if observe is not None:
            scored = drafts if before < 0 else before
            observe(Step(drafts=drafts, before=scored, workload="greedy", **seen))
        before = drafts

    server = Server(
        tree(), MACHINE, lookup, note, MOST_RUNNING, 4096, rng=np.random.default_rng(seed)
    )
    server.serve(trace)
    return steps


def arrivals(
    rate: float, seconds: float, seed: int, acceptance: tuple[float, ...] = HEAD
) -> list[Request]:
    """Poisson arrivals of answers of 64 tokens."""
    trace = poisson(rate, int(rate * seconds), acceptance, 49, ANSWER, seed)
    for request in trace:
        request.output = ANSWER
    return trace


@dataclass(frozen=True)
class Oracle:
    """Knows the fastest drafts at each batch size, with the steps there that read prompts.

    With a ``fixed_share`` the share of these steps does not depend on the choice. Then tokens pay
    that come without fewer prompts, though prompts are as many however many tokens a step brings.
    """

    lookup: list[int]
    shares: list[float]  # by batch size, of steps that read prompts
    fixed_share: bool = False

    def speed(
        self, batch_size: int, drafts: int, tokens: Callable[[int], float] = tokens_of
    ) -> float:
        """Tokens per second of a request, by the tokens of a step with so many drafts.

        Each prompt is read once, in however many steps a request gets its tokens. Where most steps
        read prompts, several are read together. Fixed tables chosen so answer as soon as any.
        """
        seconds, share = decode_seconds(drafts, batch_size), self.shares[batch_size]
        added = max(READING + 2e-3 * (drafts > 0) - seconds, 1e-3) * share
        if share in (0.0, 1.0) or self.fixed_share:
            return tokens(drafts) / (seconds + added)
        apart = -(1 - share) * np.log(1 - share) / share
        usual = tokens(self.lookup[batch_size]) / tokens(drafts)
        return float(tokens(drafts) / (seconds + added * usual**-apart))

    def lost(self, steps: list[LoggedStep], until: float) -> float:
        """Share of the capacity that was lost until so many seconds after the start."""
        got = best = 0.0
        for step in steps:
            if step.end > until or step.prompts:
                continue
            weight = step.seconds * step.batch_size
            best += weight * self.speed(step.batch_size, self.lookup[step.batch_size])
            got += weight * self.speed(step.batch_size, step.drafts)
        return 1 - got / best


@cache
def oracle(rate: float, fixed_share: bool = False) -> Oracle:
    """What is best at this rate of arrivals, by what its own servers see of prompts."""
    found = Oracle([SIZES[-1]] * (MOST_RUNNING + 1), [0.0] * (MOST_RUNNING + 1), fixed_share)
    for _ in range(3):
        counts = np.zeros((2, MOST_RUNNING.bit_length() + 1))
        for seed in (50, 51):
            for step in serve(found.lookup, None, arrivals(rate, 8, seed), seed):
                counts[int(step.prompts > 0), step.batch_size.bit_length()] += 1
        by_octave = counts[1] / np.maximum(counts.sum(axis=0), 1)
        shares = [float(by_octave[b.bit_length()]) for b in range(MOST_RUNNING + 1)]
        found = replace(found, shares=shares)
        best = [
            max([0, *SIZES], key=partial(found.speed, batch_size))
            for batch_size in range(1, MOST_RUNNING + 1)
        ]
        found = replace(found, lookup=[0, *best])
    return found


class LearningOracle:
    """Knows all that an `Oracle` knows, but acceptance: it counts that while it serves."""

    def __init__(self, known: Oracle) -> None:
        self.known = known
        self.lookup = [0] * (MOST_RUNNING + 1)
        self._acceptance = FadingAcceptance(tree())
        self._choose()

    def observe(self, step: Step) -> None:
        """Counts the trees of a step."""
        if step.paths:
            self._acceptance.add(TreeCounts.from_bytes(tree(), step.paths))
            self._choose()

    def _choose(self) -> None:
        tokens = self._acceptance.expected_tokens().tolist().__getitem__
        for batch_size in range(1, MOST_RUNNING + 1):
            speed = partial(self.known.speed, batch_size, tokens=tokens)
            self.lookup[batch_size] = max([0, *SIZES], key=speed)
