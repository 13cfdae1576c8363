"""Times the parts of every engine step inside vLLM's worker: plain, chain or Sequoia.

An engine takes it as ``worker_extension_cls``. It costs some microseconds per step, and nothing
before `StepRecorder.sequoia_record_steps`.
"""

from typing import Any

from sequoia_vllm.engine.v1.recording import RecordingV1
from sequoia_vllm.engine.v2.recording import RecordingV2

EXTENSION = "sequoia_vllm.measuring.step_recorder.StepRecorder"


class StepRecorder:
    """Methods that vLLM adds to its worker; ``collective_rpc`` calls them."""

    model_runner: Any
    _sequoia_recording: Any = None

    def sequoia_record_steps(self) -> None:
        """Records every step from now on; ends and drops an earlier recording."""
        if self._sequoia_recording is not None:
            self._sequoia_recording.end()
        runner = self.model_runner
        runs_v2 = hasattr(runner, "req_states")
        self._sequoia_recording = RecordingV2(runner) if runs_v2 else RecordingV1(runner)

    def sequoia_take_steps(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """Steps recorded since the last call, as fields of `hardware.step_curves.StepRecord`; only
        those in which ``decoding`` requests decoded and none read its prompt, if given."""
        return self._sequoia_recording.take(decoding)
