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

    def _seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def _around(
        self,
        owner: Any,
        name: str,
        part: str | None = None,
        before: Callable[..., None] | None = None,
    ) -> None:
        """Calls ``before`` with the arguments of each call, and counts its time as ``part``."""
        method, is_own = getattr(owner, name), name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            start = self._mark()
            try:
                return method(*args, **kwargs)
            finally:
                if part is not None and self._steps:
                    self._end_span(part, start)

        def end() -> None:
            if is_own:
                setattr(owner, name, method)
            else:
                delattr(owner, name)

        setattr(owner, name, timed)
        self._ends.append(end)

    def _end_span(self, part: str, start: Mark) -> None:
        self._steps[-1]["spans"].append((part, start, self._mark()))

    def take(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """The steps since the last call, as fields of `StepRecord`.
        With ``decoding``, only steps in which so many requests decoded and none read its prompt."""
        steps, self._steps = self._steps, []
        if decoding is not None:
            steps = [one for one in steps if one["decoding"] and one["requests"] == decoding]
        for step in steps:
            spans = [(part, self._seconds(*marks)) for part, *marks in step.pop("spans")]
            self._resolve(step, spans)
        return steps

    def _resolve(self, step: dict[str, Any], spans: list[tuple[str, float]]) -> None:
        """Fills in the times of a step from its spans: (part, seconds)."""
        raise NotImplementedError

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
                "passes": [],  # tokens of each, until their times are filled in
                "spans": [],
            }
        )


class RecordingV1(Recording):
    """Wraps the methods of one V1 runner, which waits for each part anyway."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._grows_trees = getattr(runner, "stats", None) is not None  # Sequoia's runner only
        self._around(runner, "execute_model", before=self._begin)
        self._around(runner, "_model_forward", "target")
        self._around(runner.model, "compute_logits", "target")
        self._around(runner, "_sample", "sampling")
        self._around(runner, "propose_draft_token_ids", "drafting")
        if self._grows_trees:
            self._around(runner, "_verify", "verify")
            self._around(runner, "_commit", "commit")
            for name in ("_forward", "_predict"):
                self._around(runner.drafter, name, "forward", before=self._begin_pass)
        elif (draft := getattr(getattr(runner, "drafter", None), "model", None)) is not None:
            self._around(draft, "forward", "forward")
            self._around(draft, "compute_logits", "forward")

    def _begin_pass(self, tokens: Any, *unused: Any, **unused_too: Any) -> None:
        if self._steps:
            self._steps[-1]["passes"].append(len(tokens))

    def _resolve(self, step: dict[str, Any], spans: list[tuple[str, float]]) -> None:
        for part, seconds in spans:
            if part != "forward":
                step[part] += seconds
        forwards = [seconds for part, seconds in spans if part == "forward"]
        step["passes"] = list(zip(step["passes"], forwards, strict=False))  # a chain tells none
        if forwards or self._grows_trees:
            step["drawing"] = step["drafting"] - sum(forwards)


class RecordingV2(Recording):
    """Wraps the methods of one V2 runner, and does not make it wait for the device.

    On a GPU the parts are spans between CUDA events on the engine's stream, read when steps are
    taken. One CUDA graph grows all levels of a tree: each draft pass gets an equal share of it.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._on_gpu = runner.device.type == "cuda"
        self._speculator = runner.speculator
        self._around(runner, "execute_model", "target", before=self._begin)
        self._around(runner.model, "compute_logits", "logits")
        self._around(runner, "sample", "sample")
        if self._speculator is not None:
            self._around(self._speculator, "propose", "drafting")

    def take(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """See `Recording.take`; waits for the device."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return super().take(decoding)

    def _resolve(self, step: dict[str, Any], spans: list[tuple[str, float]]) -> None:
        seconds = dict.fromkeys(("target", "logits", "sample", "drafting"), 0.0)
        for part, one in spans:
            seconds[part] += one
        share = seconds["drafting"] / max(1, len(step["passes"]))
        # Here verifying includes the commit, and passes include drawing.
        step["target"] = seconds["target"] + seconds["logits"]
        step["sampling"] = step["verify"] = seconds["sample"] - seconds["logits"]
        step["drafting"] = seconds["drafting"]
        step["passes"] = [(width * step["requests"], share) for width in step["passes"]]

    def _end_span(self, part: str, start: Mark) -> None:
        super()._end_span(part, start)
        if part == "drafting":
            self._steps[-1]["passes"] = getattr(self._speculator, "pass_widths", [])

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return super()._mark()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._on_gpu:
            return super()._seconds(start, end)
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
        """Takes the recorded steps, see `Recording.take`."""
        return self._sequoia_recording.take(decoding)

    def sequoia_memory(self) -> dict[str, int]:
        """Memory in use, bytes: of this process, and of its device if that is a GPU."""
        import psutil  # vLLM depends on it

        found = {"process": int(psutil.Process().memory_info().rss)}
        if self.model_runner.device.type == "cuda":
            import torch

            free, total = torch.cuda.mem_get_info()
            found |= {"allocated": torch.cuda.memory_allocated(), "device": total - free}
        return found
