"""Times the parts of every engine step, inside vLLM's worker, alike for every engine.

Given to an engine as ``worker_extension_cls``; works in plain engines, in those of
vLLM's chain and in Sequoia's. Costs some microseconds a step, and nothing until
`StepRecorder.sequoia_record_steps` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sequoia_vllm.measuring.recorder_v1 import RecordingV1
from sequoia_vllm.measuring.recorder_v2 import RecordingV2
from sequoia_vllm.measuring.wrapping import runs_v2

EXTENSION = "sequoia_vllm.measuring.step_recorder.StepRecorder"


class StepRecorder:
    """Methods added to vLLM's worker, called by ``collective_rpc``."""

    model_runner: Any

    def sequoia_record_steps(self) -> None:
        """Records every step from now on."""
        recording = RecordingV2 if runs_v2(self.model_runner) else RecordingV1
        self._sequoia_recording = recording(self.model_runner)

    def sequoia_take_steps(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """The steps recorded since the last call: fields of `StepTimes`.

        Args:
            decoding: Only steps in which so many requests decoded, and none read its prompt.
        """
        return self._sequoia_recording.take(decoding)


@dataclass(frozen=True)
class StepTimes:
    """One step of an engine; times in seconds.

    Attributes:
        start: When it started, by the worker's clock.
        requests: Requests in it.
        fewest, most: Tokens of the request that has fewest, and most, in it.
        target: The target's forward passes, LM head included.
        decoding: Whether none of its requests read its prompt.
        sampling: From the target's logits to what is emitted; in a Sequoia engine
            all of verification and commit.
        verify: Walking the trees; 0 in a plain engine of Model Runner V1.
        commit: Moving accepted keys and values; 0 in a plain engine.
        drafting: All of the drafting.
        drawing: Of it what is outside the draft's forward passes, where that can be told.
        passes: The draft's forward passes: (tokens of all requests, seconds).
            The first is over what the last step committed, each other one over
            one level of the trees.
    """

    start: float
    requests: int
    fewest: int
    most: int
    target: float
    decoding: bool = True
    sampling: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    drafting: float = 0.0
    drawing: float = 0.0
    passes: Sequence[tuple[int, float]] = ()

    def levels(self) -> list[tuple[float, float]]:
        """Each pass as (tokens per request, seconds), drawing children included.

        What drafting spends outside its forward passes is shared among them.
        """
        outside = self.drafting - sum(seconds for _, seconds in self.passes)
        share = outside / max(1, len(self.passes))
        return [(tokens / self.requests, seconds + share) for tokens, seconds in self.passes]
