"""Times the parts of every step of Model Runner V1, which waits for each part anyway."""

from collections.abc import Callable
from typing import Any

from sequoia_vllm.engine.runner.wrapping import Mark, Recording


class RecordingV1(Recording):
    """Wraps the methods of one V1 runner: plain vLLM's, a chain's or Sequoia's."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._stats = getattr(runner, "stats", None)  # Sequoia's runner only
        self._forwards_before = 0.0
        self._chain_forwards = 0.0
        self._trace_before: list[Any] | None = None
        self._around(runner, "execute_model", before=self._begin)
        self._around(runner, "_model_forward", self._adder("target"))
        self._around(runner.model, "compute_logits", self._adder("target"))
        self._around(runner, "_sample", self._adder("sampling"))
        self._around(
            runner, "propose_draft_token_ids", self._add_drafting, before=self._begin_drafting
        )
        if self._stats is not None:
            self._around(runner, "_verify", self._adder("verify"))
            self._around(runner, "_commit", self._adder("commit"))
        elif (draft := getattr(getattr(runner, "drafter", None), "model", None)) is not None:
            self._around(draft, "forward", self._add_chain_forward)
            self._around(draft, "compute_logits", self._add_chain_forward)

    def _add(self, part: str, seconds: float) -> None:
        if self._steps:
            self._steps[-1][part] += seconds

    def _adder(self, part: str) -> Callable[[Mark, Mark], None]:
        return lambda start, end: self._add(part, end - start)

    def _begin_drafting(self, *unused: Any, **unused_too: Any) -> None:
        self._chain_forwards = 0.0
        if self._stats is not None:
            self._forwards_before = self._stats.seconds["draft"]
            self._trace_before, self._stats.trace = self._stats.trace, []

    def _add_chain_forward(self, start: Mark, end: Mark) -> None:
        """Times a chain's draft model, whose runner has no timers."""
        self._chain_forwards += end - start

    def _add_drafting(self, start: Mark, end: Mark) -> None:
        seconds = end - start
        self._add("drafting", seconds)
        if self._stats is None:
            self._add("drawing", seconds - self._chain_forwards if self._chain_forwards else 0.0)
            return
        forwards = self._stats.seconds["draft"] - self._forwards_before
        self._add("drawing", seconds - forwards)
        trace, self._stats.trace = self._stats.trace, self._trace_before
        if self._stats.trace is not None:  # `sequoia_stats` was asked for one
            self._stats.trace += trace
        if self._steps:
            self._steps[-1]["passes"] = [
                (tokens, taken) for part, _, tokens, taken in trace if part == "draft"
            ]
