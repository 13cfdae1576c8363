"""Times the parts of every step of Model Runner V2, without making it wait for the device.

On a GPU the parts are spans between CUDA events on the engine's stream, read
only when the steps are taken. A tree's levels grow in one CUDA graph: the draft's
passes cannot be told apart, and each gets an equal share of their time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sequoia_vllm.engine.runner.wrapping import Mark, around_marks, is_decoding


@dataclass
class _Step:
    start: float
    scheduled: list[int]
    is_decoding: bool
    spans: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)


class RecordingV2:
    """Wraps the methods of one V2 runner, of a plain, a chain's or a Sequoia engine.

    Args:
        runner: The runner.
    """

    def __init__(self, runner: Any) -> None:
        self._on_gpu = runner.device.type == "cuda"
        self._speculator = runner.speculator
        self._steps: list[_Step] = []
        self._ends: list[Callable[[], None]] = []
        self._around(runner, "execute_model", "target", before=self._begin)
        self._around(runner.model, "compute_logits", "logits")
        self._around(runner, "sample", "sample")
        if self._speculator is not None:
            self._around(self._speculator, "propose", "drafting")

    def take(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """The steps since the last call: fields of `StepRecord`.

        Args:
            decoding: Only steps in which so many requests decoded, and none read its prompt.
        """
        steps, self._steps = self._steps, []
        if decoding is not None:
            steps = [step for step in steps if step.is_decoding and len(step.scheduled) == decoding]
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return [self._resolved(step) for step in steps]

    def end(self) -> None:
        """Records no more: the runner is as it was."""
        while self._ends:
            self._ends.pop()()

    def _resolved(self, step: _Step) -> dict[str, Any]:
        seconds = dict.fromkeys(("target", "logits", "sample", "drafting"), 0.0)
        for part, start, end in step.spans:
            seconds[part] += self._seconds(start, end)
        share = seconds["drafting"] / max(1, len(step.passes))
        sampling = seconds["sample"] - seconds["logits"]
        requests = len(step.scheduled)
        return {
            "start": step.start,
            "requests": requests,
            "fewest": min(step.scheduled, default=0),
            "most": max(step.scheduled, default=0),
            "decoding": step.is_decoding,
            "target": seconds["target"] + seconds["logits"],
            "sampling": sampling,
            "verify": sampling,
            "commit": 0.0,  # part of verify
            "drafting": seconds["drafting"],
            "drawing": 0.0,  # part of the passes
            "passes": [(width * requests, share) for width in step.passes],
        }

    def _begin(self, scheduler_output: Any, *unused: Any, **unused_too: Any) -> None:
        scheduled = list(scheduler_output.num_scheduled_tokens.values())
        self._steps.append(_Step(time.perf_counter(), scheduled, is_decoding(scheduler_output)))

    def _around(
        self, owner: Any, name: str, part: str, before: Callable[..., None] | None = None
    ) -> None:
        def add_span(start: Mark, end: Mark) -> None:
            if not self._steps:
                return
            step = self._steps[-1]
            step.spans.append((part, start, end))
            if part == "drafting":
                step.passes = getattr(self._speculator, "pass_widths", [])

        self._ends.append(around_marks(owner, name, self._mark, before, add_span))

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._on_gpu:
            return float(end - start)
        return float(start.elapsed_time(end)) * 1e-3
