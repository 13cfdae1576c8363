"""The recording of steps that fits a runner."""

from __future__ import annotations

from typing import Any

from sequoia_vllm.engine.runner.wrapping import runs_v2
from sequoia_vllm.engine.v1.recording import RecordingV1
from sequoia_vllm.engine.v2.recording import RecordingV2


def recording_of(runner: Any) -> RecordingV1 | RecordingV2:
    """Begins to time the parts of every step of a runner, of any engine."""
    return RecordingV2(runner) if runs_v2(runner) else RecordingV1(runner)
