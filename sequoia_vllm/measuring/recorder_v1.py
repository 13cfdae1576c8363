"""Times the parts of every engine step, inside vLLM's worker.

Given to an engine as ``worker_extension_cls``; works in plain engines and in
Sequoia's. Nothing is timed until `StepRecorder.sequoia_record_steps` is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sequoia_vllm.measuring.recorder_v2 import RecordingV2
from sequoia_vllm.measuring.wrapping import around, runs_v2

EXTENSION = "sequoia_vllm.measuring.recorder_v1.StepRecorder"


class StepRecorder:
    """Methods added to vLLM's worker, called by ``collective_rpc``."""

    model_runner: Any

    def sequoia_record_steps(self) -> None:
        """Starts recording every step."""
        self._sequoia_recording = recording_of(self.model_runner)

    def sequoia_take_steps(self) -> list[dict[str, Any]]:
        """The steps recorded since the last call (fields of `StepTimes`)."""
        steps: list[dict[str, Any]] = self._sequoia_recording.take()
        return steps


def recording_of(runner: Any) -> Any:
    """Records the steps of a runner, V1 or V2."""
    return RecordingV2(runner) if runs_v2(runner) else _Recording(runner)


class _Recording:
    """Wraps the runner's methods, on this one instance, to time them."""

    def __init__(self, runner: Any) -> None:
        self.steps: list[dict[str, Any]] = []
        self._stats = getattr(runner, "stats", None)  # Sequoia's runner only
        around(runner, "execute_model", before=self._begin)
        around(runner, "_model_forward", after=self._adder("target"))
        around(runner.model, "compute_logits", after=self._adder("target"))
        if self._stats is not None:
            around(runner, "_verify", after=self._adder("verify"))
            around(runner, "_commit", after=self._adder("commit"))
            around(runner, "propose_draft_token_ids", self._begin_drafting, self._add_drafting)

    def take(self) -> list[dict[str, Any]]:
        """The steps recorded since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def _begin(self, scheduler_output: Any, *unused: Any, **unused_too: Any) -> None:
        scheduled = list(scheduler_output.num_scheduled_tokens.values())
        self.steps.append(
            {
                "start": time.perf_counter(),
                "requests": len(scheduled),
                "fewest": min(scheduled, default=0),
                "most": max(scheduled, default=0),
                "target": 0.0,
                "verify": 0.0,
                "commit": 0.0,
                "drafting": 0.0,
                "passes": [],
            }
        )

    def _adder(self, part: str) -> Callable[[float], None]:
        def add(seconds: float) -> None:
            if self.steps:
                self.steps[-1][part] += seconds

        return add

    def _begin_drafting(self, *unused: Any, **unused_too: Any) -> None:
        assert self._stats is not None
        self._stats.trace = []

    def _add_drafting(self, seconds: float) -> None:
        assert self._stats is not None
        if self.steps:
            self.steps[-1]["drafting"] += seconds
            self.steps[-1]["passes"] = [
                (tokens, taken) for part, _, tokens, taken in self._stats.trace if part == "draft"
            ]
