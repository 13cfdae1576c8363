"""Times the parts of every decoding step, inside vLLM's worker, alike for every method.

Given to an engine as ``worker_extension_cls``. Costs some microseconds a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sequoia_vllm.measuring.recorder_v2 import RecordingV2
from sequoia_vllm.measuring.wrapping import around, is_decoding, runs_v2

EXTENSION = "sequoia_vllm.bench.worker.PartTimes"
PARTS = ("target", "draft", "drawing", "verify")


class PartTimes:
    """Methods added to vLLM's worker, called by ``collective_rpc``."""

    model_runner: Any

    def bench_start_timing(self) -> None:
        """Times every step from now on."""
        times = _TimesV2 if runs_v2(self.model_runner) else _Times
        self._bench_times = times(self.model_runner)

    def bench_take_times(self, batch_size: int) -> dict[str, float]:
        """Seconds of each part, and "steps", since the last call.

        Only of steps in which ``batch_size`` requests decoded and none read its prompt.
        """
        return self._bench_times.take(batch_size)


class _TimesV2:
    """The parts of Model Runner V2; drawing is part of a tree's growth there."""

    def __init__(self, runner: Any) -> None:
        self._recording = RecordingV2(runner)

    def take(self, batch_size: int) -> dict[str, float]:
        wanted = self._recording.take(decoding=batch_size)
        return {
            "target": sum(step["target"] for step in wanted),
            "draft": sum(step["drafting"] for step in wanted),
            "drawing": 0.0,
            "verify": sum(step["verify"] for step in wanted),
            "steps": len(wanted),
        }


class _Times:
    """Wraps the methods of one runner."""

    def __init__(self, runner: Any) -> None:
        self._stats = getattr(runner, "stats", None)  # Sequoia's runner only
        self._forwards_before = 0.0
        self._steps: list[tuple[int, dict[str, float]]] = []  # decoding requests; 0: not steady
        around(runner, "execute_model", before=self._begin)
        around(runner, "_model_forward", after=self._adder("target"))
        around(runner.model, "compute_logits", after=self._adder("target"))
        # vLLM's rejection sampler, Sequoia's verifier and commit, or plain sampling.
        around(runner, "_sample", after=self._adder("verify"))
        around(runner, "propose_draft_token_ids", self._begin_drafting, self._add_drafting)

    def take(self, batch_size: int) -> dict[str, float]:
        wanted = [parts for requests, parts in self._steps if requests == batch_size]
        self._steps = []
        found = {part: sum(step[part] for step in wanted) for part in PARTS}
        return {**found, "steps": len(wanted)}

    def _begin(self, scheduler_output: Any, *unused: Any, **unused_too: Any) -> None:
        requests = len(scheduler_output.num_scheduled_tokens)
        decoding = requests if is_decoding(scheduler_output) else 0
        self._steps.append((decoding, dict.fromkeys(PARTS, 0.0)))

    def _adder(self, part: str) -> Callable[[float], None]:
        def add(seconds: float) -> None:
            if self._steps:
                self._steps[-1][1][part] += seconds

        return add

    def _begin_drafting(self, *unused: Any, **unused_too: Any) -> None:
        self._forwards_before = self._draft_forwards()

    def _add_drafting(self, seconds: float) -> None:
        # Of vLLM's chain the forwards are not timed apart: all of it is the draft's.
        inside = seconds
        if self._stats is not None:
            inside = self._draft_forwards() - self._forwards_before
        self._adder("draft")(inside)
        self._adder("drawing")(seconds - inside)

    def _draft_forwards(self) -> float:
        return 0.0 if self._stats is None else self._stats.seconds["draft"]
