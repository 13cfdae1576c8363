"""Times the parts of every engine step, inside vLLM's worker, alike for every engine.

Given to an engine as ``worker_extension_cls``; works in plain engines, in those of
vLLM's chain and in Sequoia's. Costs some microseconds a step, and nothing until
`StepRecorder.sequoia_record_steps` is called.
"""

from __future__ import annotations

from typing import Any

from sequoia_vllm.engine.v1.recording import RecordingV1
from sequoia_vllm.engine.v2.recording import RecordingV2

EXTENSION = "sequoia_vllm.measuring.step_recorder.StepRecorder"


class StepRecorder:
    """Methods added to vLLM's worker, called by ``collective_rpc``."""

    model_runner: Any
    _sequoia_recording: Any = None

    def sequoia_record_steps(self) -> None:
        """Records every step from now on; ends an earlier recording, and drops what it holds."""
        if self._sequoia_recording is not None:
            self._sequoia_recording.end()
        runner = self.model_runner
        runs_v2 = hasattr(runner, "req_states")
        self._sequoia_recording = RecordingV2(runner) if runs_v2 else RecordingV1(runner)

    def sequoia_take_steps(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """The steps recorded since the last call: fields of `hardware.step_curves.StepRecord`.

        Args:
            decoding: Only steps in which so many requests decoded, and none read its prompt.
        """
        return self._sequoia_recording.take(decoding)
