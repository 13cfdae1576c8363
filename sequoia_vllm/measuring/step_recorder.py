"""Times the parts of every engine step inside vLLM's worker: plain, chain or Sequoia.

An engine takes `StepRecorder` as ``worker_extension_cls``. It costs some microseconds per step, and
nothing before `StepRecorder.sequoia_record_steps`.
"""

import time
from collections.abc import Callable
from typing import Any

EXTENSION = "sequoia_vllm.measuring.step_recorder.StepRecorder"

Mark = Any
"""A moment: seconds on the host, or an event on a device."""

_PARTS = ("target", "sampling", "verify", "commit", "drafting", "drawing")  # of a step, in seconds


class Recording:
    """Wraps the methods of one runner, of a plain, a chain's or a Sequoia engine."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []
        self._ends: list[Callable[[], None]] = []

    def _mark(self) -> Mark:
        return time.perf_counter()

    def _around(
        self,
        owner: Any,
        name: str,
        after: Callable[[Mark, Mark], None] | None = None,
        before: Callable[..., None] | None = None,
    ) -> None:
        """Calls ``before`` with the arguments of each call, ``after`` with marks around it."""
        method, is_own = getattr(owner, name), name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            start = self._mark()
            try:
                return method(*args, **kwargs)
            finally:
                if after is not None:
                    after(start, self._mark())

        def end() -> None:
            if is_own:
                setattr(owner, name, method)
            else:
                delattr(owner, name)

        setattr(owner, name, timed)
        self._ends.append(end)

    def take(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """The steps since the last call: fields of `StepRecord`.

        Args:
            decoding: Only steps in which so many requests decoded, and none read its prompt.
        """
        steps, self._steps = self._steps, []
        if decoding is None:
            return steps
        return [step for step in steps if step["decoding"] and step["requests"] == decoding]

    def end(self) -> None:
        """Ends the recording: the runner is as before."""
        while self._ends:
            self._ends.pop()()

    def _begin(self, scheduler_output: Any, *unused: Any, **unused_too: Any) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        drafted = scheduler_output.scheduled_spec_decode_tokens
        new = {name: rows - len(drafted.get(name, ())) for name, rows in scheduled.items()}
        self._steps.append(
            {
                "start": time.perf_counter(),
                "requests": len(scheduled),
                "fewest": min(scheduled.values(), default=0),
                "most": max(scheduled.values(), default=0),
                "decoding": set(new.values()) <= {1},  # no request reads its prompt
                **dict.fromkeys(_PARTS, 0.0),
                "passes": [],
            }
        )


class RecordingV1(Recording):
    """Wraps the methods of one V1 runner, which waits for each part anyway."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._grows_trees = getattr(runner, "stats", None) is not None  # Sequoia's runner only
        self._forwards = 0.0  # seconds of the draft's, since the step began to draft
        self._tokens = 0
        self._around(runner, "execute_model", before=self._begin)
        self._around(runner, "_model_forward", self._adder("target"))
        self._around(runner.model, "compute_logits", self._adder("target"))
        self._around(runner, "_sample", self._adder("sampling"))
        self._around(
            runner, "propose_draft_token_ids", self._add_drafting, before=self._begin_drafting
        )
        if self._grows_trees:
            self._around(runner, "_verify", self._adder("verify"))
            self._around(runner, "_commit", self._adder("commit"))
            for name in ("_forward", "_predict"):
                self._around(runner.drafter, name, self._add_pass, before=self._begin_pass)
        elif (draft := getattr(getattr(runner, "drafter", None), "model", None)) is not None:
            self._around(draft, "forward", self._add_forward)
            self._around(draft, "compute_logits", self._add_forward)

    def _add(self, part: str, seconds: float) -> None:
        if self._steps:
            self._steps[-1][part] += seconds

    def _adder(self, part: str) -> Callable[[Mark, Mark], None]:
        return lambda start, end: self._add(part, end - start)

    def _begin_drafting(self, *unused: Any, **unused_too: Any) -> None:
        self._forwards = 0.0

    def _begin_pass(self, tokens: Any, *unused: Any, **unused_too: Any) -> None:
        self._tokens = len(tokens)

    def _add_pass(self, start: Mark, end: Mark) -> None:
        self._add_forward(start, end)
        if self._steps:
            self._steps[-1]["passes"].append((self._tokens, end - start))

    def _add_forward(self, start: Mark, end: Mark) -> None:
        self._forwards += end - start

    def _add_drafting(self, start: Mark, end: Mark) -> None:
        self._add("drafting", end - start)
        if self._forwards or self._grows_trees:
            self._add("drawing", end - start - self._forwards)


class RecordingV2(Recording):
    """Wraps the methods of one V2 runner, and does not make it wait for the device.

    On a GPU the parts are spans between CUDA events on the engine's stream, read only when steps
    are taken. One CUDA graph grows all levels of a tree, so each draft pass gets an equal share of
    its time.
    """

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
