"""Times the parts of every step of Model Runner V1, which waits for each part anyway."""

from collections.abc import Callable
from typing import Any

from sequoia_vllm.engine.runner.wrapping import Recording, around


class RecordingV1(Recording):
    """Wraps the methods of one V1 runner: plain vLLM's, a chain's or Sequoia's."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._stats = getattr(runner, "stats", None)  # Sequoia's runner only
        self._forwards_before = 0.0
        self._chain_forwards = 0.0
        self._trace_before: list[Any] | None = None
        self._ends = [
            around(runner, "execute_model", before=self._begin),
            around(runner, "_model_forward", after=self._adder("target")),
            around(runner.model, "compute_logits", after=self._adder("target")),
            around(runner, "_sample", after=self._adder("sampling")),
            around(runner, "propose_draft_token_ids", self._begin_drafting, self._add_drafting),
        ]
        if self._stats is not None:
            self._ends += [
                around(runner, "_verify", after=self._adder("verify")),
                around(runner, "_commit", after=self._adder("commit")),
            ]
        elif (draft := getattr(getattr(runner, "drafter", None), "model", None)) is not None:
            self._ends += [
                around(draft, "forward", after=self._add_chain_forward),
                around(draft, "compute_logits", after=self._add_chain_forward),
            ]

    def _adder(self, part: str) -> Callable[[float], None]:
        def add(seconds: float) -> None:
            if self._steps:
                self._steps[-1][part] += seconds

        return add

    def _begin_drafting(self, *unused: Any, **unused_too: Any) -> None:
        self._chain_forwards = 0.0
        if self._stats is not None:
            self._forwards_before = self._stats.seconds["draft"]
            self._trace_before, self._stats.trace = self._stats.trace, []

    def _add_chain_forward(self, seconds: float) -> None:
        """Times the draft model of vLLM's chain, whose runner has no timers."""
        self._chain_forwards += seconds

    def _add_drafting(self, seconds: float) -> None:
        self._adder("drafting")(seconds)
        if self._stats is None:
            self._adder("drawing")(seconds - self._chain_forwards if self._chain_forwards else 0.0)
            return
        forwards = self._stats.seconds["draft"] - self._forwards_before
        self._adder("drawing")(seconds - forwards)
        trace, self._stats.trace = self._stats.trace, self._trace_before
        if self._stats.trace is not None:  # `sequoia_stats` was asked for one
            self._stats.trace += trace
        if self._steps:
            self._steps[-1]["passes"] = [
                (tokens, taken) for part, _, tokens, taken in trace if part == "draft"
            ]
