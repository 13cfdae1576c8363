"""Times an engine's steps in its warm-up, and keeps them for its next start."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from sequoia_vllm.engine.common.draft_schedule import fewer_drafts, scheduled_drafts
from sequoia_vllm.engine.common.replicas import in_lock_step
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.runner.tensor_parallel import broadcast_from_rank0
from sequoia_vllm.engine.runner.wrapping import runs_v2
from sequoia_vllm.engine.worker.recording import recording_of
from sequoia_vllm.engine.worker.start.dummy_requests import DummyRequests, Layout
from sequoia_vllm.engine.worker.start.points import Point, points_to_time
from sequoia_vllm.hardware.assumptions import Assumptions
from sequoia_vllm.hardware.step_curves import (
    BatchCurves,
    BatchTimes,
    TimedStep,
    batch_curves,
    draft_curves,
    middle_round,
    steady_steps,
)
from sequoia_vllm.hardware.step_profile import Curve, Profile
from sequoia_vllm.library.start_times import ToTime, save_start_times
from sequoia_vllm.library.user_files import user_directory

logger = logging.getLogger("vllm.sequoia")

SECONDS = 3.0
"""What timing may take, but for two kinds of steps that are timed always."""

_MOST_STEPS = 10  # of each kind
_UNTIMED = 2  # the first of each kind: requests begin, and score their first trees
# Interquartile range over median of plain steps, at most; under load by others it is more.
_MOST_SPREAD = 0.5
# The target's share of a step is no less than this part of its forward pass.
_LEAST_SHARE = 0.8
_FEWEST_JUDGED = 4


def time_at_start(worker: Any) -> None:
    """Times steps and keeps the times, where the front end asked for it; else does nothing.

    On every rank of a tensor-parallel group, in lock step: what is run is decided on rank 0,
    which also writes. Whatever fails is logged, and the engine starts. Replicas that are in
    lock step time nothing: each would run as many steps as it has time for.

    Args:
        worker: A Sequoia worker that has warmed up, before it serves.
    """
    wanted = SequoiaSettings.of(worker.vllm_config).to_time
    if wanted is None or in_lock_step(worker.vllm_config):
        return
    started = time.perf_counter()
    try:
        times = _measure(worker)
        if times is None or get_tp_group().rank_in_group > 0:
            return
        if not (is_steady(middle_round(times.plain)) and is_sound(_curves_of(times))):
            logger.info(
                "Sequoia: steps took too unequal times to choose a tree with them, as if "
                "the device was busy; the next start times them again"
            )
            return
        is_ahead = bool(worker.vllm_config.scheduler_config.async_scheduling)
        profile = profile_of(wanted, times, waits_for_core=not is_ahead)
        path = save_start_times(user_directory(), wanted, profile)
    except Exception as error:  # an engine serves without times
        logger.warning(
            'Sequoia: steps were not timed for the next start ("tune_at_start": false switches '
            "this off): %s: %s",
            type(error).__name__, error,
        )  # fmt: skip
        return
    logger.info(
        "Sequoia: timed passes over %s tokens in %.1f s; the next start chooses its tree with "
        "these times (%s)",
        ", ".join(map(str, [1, *sorted(times.trees)])), time.perf_counter() - started, path,
    )  # fmt: skip


def _measure(worker: Any) -> BatchTimes | None:
    """The recorded steps, as of one request of so many tokens; None: there is no room."""
    runner, config = worker.model_runner, worker.vllm_config
    fewer = fewer_drafts(config) if runs_v2(runner) else None
    most_tokens = config.scheduler_config.max_num_batched_tokens
    points = points_to_time(scheduled_drafts(config), most_tokens, fewer)
    # Plain steps once more, when the engine has run for a while: all is compared with them.
    points[2:2] = points[:1]
    layout = Layout.of(runner)
    times = BatchTimes(1, layout.context, [], {})
    with _as_before(worker):
        session = _Session(worker, layout, len(points))
        try:
            for number, point in enumerate(points):
                steps = session.steps_of(point, is_needed=number < 2)
                if steps and point.nodes == 1:
                    times.plain.append(steps)
                elif steps:
                    times.trees[point.tokens] = [steps]
        finally:
            session.end()
    return times if times.plain and times.trees else None


class _Session:
    """Runs one kind of steps after the other, as long as time is left.

    Args:
        worker: The worker.
        layout: Of its cache.
        kinds: How many kinds of steps share the time.
    """

    def __init__(self, worker: Any, layout: Layout, kinds: int) -> None:
        self._worker = worker
        self._layout = layout
        self._share = SECONDS / kinds
        self._tree = SequoiaSettings.of(worker.vllm_config).tree
        self._recording = recording_of(worker.model_runner)
        self._end = time.perf_counter() + SECONDS
        self._slowest = Point(1, 1), 0.0  # seconds of a step

    def end(self) -> None:
        """The runner is as it was."""
        self._recording.end()

    def steps_of(self, point: Point, is_needed: bool) -> list[TimedStep]:
        """The timed steps of one kind; none if there is no room or no time left for it."""
        most = _MOST_STEPS + _UNTIMED + 1
        emitted = int(self._tree.depths[: point.nodes].max()) + 1
        length = self._layout.context + 1 + most * emitted + 2 * point.nodes
        blocks = self._layout.block_ids(point.requests, length)
        if blocks is None or length > self._layout.max_length:
            return []
        # Beginning, one untimed, one to time the others by, and one that ends it.
        if not is_needed and not self._agreed(4 * self._expected(point) < self._left()):
            return []
        batch = DummyRequests(self._worker, point, blocks, self._layout.context)
        self._recording.take()
        try:
            batch.begin()
            each = min(self._seconds(batch.step) for _ in range(2))
            timed = min(self._share, self._left()) / each
            for _ in range(self._agreed(min(max(int(timed), 1), _MOST_STEPS))):
                batch.step()
        finally:
            batch.end()
        if point.tokens > self._slowest[0].tokens or not self._slowest[1]:
            self._slowest = point, each
        # The last record is of the step that lets requests finish.
        return _as_one(self._recording.take()[_UNTIMED:-1], point)

    @staticmethod
    def _seconds(step: Callable[[], None]) -> float:
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    def _left(self) -> float:
        return self._end - time.perf_counter()

    def _expected(self, point: Point) -> float:
        slowest, seconds = self._slowest
        return seconds * max(1.0, point.tokens / slowest.tokens)

    def _agreed(self, value: int) -> int:
        """Rank 0's: were ranks to run different steps, each would wait for the others forever."""
        decided = torch.tensor([int(value)], device=self._worker.model_runner.device)
        return int(broadcast_from_rank0(decided)[0])


def is_steady(steps: Sequence[TimedStep]) -> bool:
    """Whether steps of one kind took about the same time; of few it cannot be told."""
    low, middle, high = np.percentile([timed.seconds for timed in steps], [25, 50, 75])
    return len(steps) < _FEWEST_JUDGED or bool(high - low <= _MOST_SPREAD * middle)


def _as_one(records: list[dict[str, Any]], point: Point) -> list[TimedStep]:
    """The steady steps, as if one request had the tokens of all."""
    steps = steady_steps(records, point.requests, point.nodes)
    tokens = point.tokens
    return [
        TimedStep(replace(timed.step, requests=1, fewest=tokens, most=tokens), timed.seconds)
        for timed in steps
    ]


@contextmanager
def _as_before(worker: Any) -> Iterator[None]:
    """Random streams are afterwards what they were."""
    device = worker.model_runner.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def profile_of(wanted: ToTime, times: BatchTimes, *, waits_for_core: bool) -> Profile:
    """The profile of what was timed.

    Args:
        wanted: What the engine was asked to time.
        times: Of one request; several are seen as one with the tokens of all.
        waits_for_core: Whether the engine core schedules between steps, and not meanwhile: its
            time, which no worker sees, is assumed to be what a step is assumed to take outside
            its passes.
    """
    assumed = Assumptions()
    plain_core, tree_core = (
        (assumed.plain_step_seconds, assumed.tree_step_seconds) if waits_for_core else (0.0, 0.0)
    )
    curves = _curves_of(times)
    draft_level, draft_reading = draft_curves([curves.draft], wanted.head)
    pair = wanted.pair
    return Profile(
        source="warm-up",
        date=datetime.datetime.now(datetime.UTC).date(),
        device=pair.device,
        target=pair.target,
        draft=pair.draft,
        target_parameters=wanted.target_parameters,
        draft_parameters=wanted.draft_parameters,
        dtype=pair.dtype,
        tensor_parallel_size=pair.tensor_parallel_size,
        offloading=pair.offloading,
        target_forward=[_never_slower(curves.target)],
        draft_level=draft_level,
        draft_reading=draft_reading,
        head=wanted.head,
        verification=[curves.verification],
        overhead=[
            curves.overhead.model_copy(
                update={
                    "plain_seconds": round(curves.overhead.plain_seconds + plain_core, 7),
                    "tree_seconds": round(curves.overhead.tree_seconds + tree_core, 7),
                }
            )
        ],
        assumptions={"plain_core_seconds": plain_core, "tree_core_seconds": tree_core},
        provenance={
            "measured_with": "steps of greedy dummy requests in an engine's warm-up; several stand "
            "for one with the tokens of all; the engine core's part of the overhead is assumed",
            "target_forward": "the forward pass, the LM head, and all of a step that grows with "
            "the tree but verification; a pass counts as no slower than one over more tokens",
            "runs": dict(wanted.runs),
            "steps": {str(size): len(rounds[0]) for size, rounds in sorted(times.trees.items())},
        },
    )


def _curves_of(times: BatchTimes) -> BatchCurves:
    has_levels = any(
        len(timed.step.passes) > 1
        for rounds in times.trees.values() for steps in rounds for timed in steps
    )  # fmt: skip
    return batch_curves(times, first_pass=1 if has_levels else 0)


def is_sound(curves: BatchCurves) -> bool:
    """Whether the target's share of each step is no less than its forward pass, or nearly so.

    It is what draft and verification leave of the step: where these were timed while the
    device did other things too, too little is left.
    """
    return all(
        seconds >= _LEAST_SHARE * curves.forward_seconds[tokens]
        for tokens, seconds in zip(curves.target.tokens, curves.target.seconds, strict=True)
    )


def _never_slower(curve: Curve) -> Curve:
    """The same, where no pass takes longer than one over more tokens: that could be run instead."""
    seconds = list(curve.seconds)
    for place in reversed(range(len(seconds) - 1)):
        seconds[place] = min(seconds[place : place + 2])
    return curve.model_copy(update={"seconds": seconds})
