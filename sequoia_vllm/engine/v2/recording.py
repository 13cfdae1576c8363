"""Times the parts of every step of Model Runner V2, without making it wait for the device.

On a GPU the parts are spans between CUDA events on the engine's stream, read only when steps are
taken. One CUDA graph grows all levels of a tree, so each draft pass gets an equal share of its
time.
"""

from collections.abc import Callable
from typing import Any

from sequoia_vllm.engine.runner.wrapping import Mark, Recording


class RecordingV2(Recording):
    """Wraps the methods of one V2 runner: plain vLLM's, a chain's or Sequoia's."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._on_gpu = runner.device.type == "cuda"
        self._speculator = runner.speculator
        self._around(runner, "execute_model", self._adder("target"), before=self._begin)
        self._around(runner.model, "compute_logits", self._adder("logits"))
        self._around(runner, "sample", self._adder("sample"))
        if self._speculator is not None:
            self._around(self._speculator, "propose", self._adder("drafting"))

    def take(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """See `Recording.take`; waits for the device."""
        steps = super().take(decoding)
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        for step in steps:
            self._resolve(step)
        return steps

    def _resolve(self, step: dict[str, Any]) -> None:
        """Fills in the times, once the device has finished the step."""
        seconds = dict.fromkeys(("target", "logits", "sample", "drafting"), 0.0)
        for part, start, end in step.pop("spans"):
            seconds[part] += self._seconds(start, end)
        share = seconds["drafting"] / max(1, len(step["passes"]))
        # Here verifying includes the commit, and passes include drawing.
        step["target"] = seconds["target"] + seconds["logits"]
        step["sampling"] = step["verify"] = seconds["sample"] - seconds["logits"]
        step["drafting"] = seconds["drafting"]
        step["passes"] = [(width * step["requests"], share) for width in step["passes"]]

    def _begin(self, *args: Any, **kwargs: Any) -> None:
        super()._begin(*args, **kwargs)
        self._steps[-1]["spans"] = []

    def _adder(self, part: str) -> Callable[[Mark, Mark], None]:
        def add_span(start: Mark, end: Mark) -> None:
            if not self._steps:
                return
            step = self._steps[-1]
            step["spans"].append((part, start, end))
            if part == "drafting":
                step["passes"] = getattr(self._speculator, "pass_widths", [])

        return add_span

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return super()._mark()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._on_gpu:
            return float(end - start)
        return float(start.elapsed_time(end)) * 1e-3
