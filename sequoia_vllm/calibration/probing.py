"""Drives an engine over a workload, and reads its counters as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from sequoia_vllm.calibration.counts import add_counts, estimate_acceptance, precision
from sequoia_vllm.calibration.workload import Completion, Workload
from sequoia_vllm.library.files import CalibrationState

StoppedBy = Literal["precision", "tokens", "prompts", "interrupt"]


@dataclass(frozen=True)
class Counters:
    """What the verifier did (`StepStats`), earlier runs included.

    Attributes:
        trees: Trees verified.
        tokens: Tokens that they emitted.
        offered, accepted: ``[depth][child]``.
    """

    trees: int = 0
    tokens: int = 0
    offered: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    @classmethod
    def of_state(cls, state: CalibrationState) -> Counters:
        """Those of an earlier run."""
        return cls(state.trees, state.tokens, state.offered, state.accepted)

    def plus(self, stats: dict[str, Any]) -> Counters:
        """With those of an engine added (`StepStats.to_dict`)."""
        return Counters(
            self.trees + stats["tree_steps"],
            self.tokens + stats["tokens"],
            add_counts(self.offered, stats["offered"]),
            add_counts(self.accepted, stats["accepted"]),
        )

    def precision(self) -> float | None:
        """How well the vector is known (`counts.precision`); None: not at all."""
        if self.trees == 0:
            return None
        return precision(estimate_acceptance(self.offered, self.accepted))


@dataclass(frozen=True)
class Checkpoint:
    """Counters and, read at the same moment, how far the workload is (`Workload.state`)."""

    counters: Counters
    workload: dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """When a measurement is done: the vector known this well, or so many tokens generated."""

    precision: float
    tokens: int


class Probe:
    """One run of a calibration.

    Attributes:
        checkpoint: What is known so far; outlives the engine.
    """

    def __init__(
        self,
        workload: Workload,
        start: Counters,
        budget: Budget,
        interval: float = 1.0,
        depth: int | None = None,
    ) -> None:
        """Prepares a run.

        Args:
            workload: What to generate.
            start: Counters of earlier runs.
            budget: When to stop.
            interval: Seconds between checkpoints; 0: after every step.
            depth: Levels of the tree whose children are counted; None: all.
        """
        self._depth = depth
        self._workload = workload
        self._start = start
        self._budget = budget
        self._interval = interval
        self._running: dict[str, Completion] = {}
        self._seen: dict[str, int] = {}
        self._generated = 0
        self.checkpoint = Checkpoint(start, workload.state())

    def run(
        self,
        llm: Any,
        temperature: float,
        top_p: float,
        batch_size: int,
        on_checkpoint: Callable[[Checkpoint], None],
    ) -> StoppedBy:
        """Generates until the budget is used up or the workload is at its end.

        Args:
            llm: A ``vllm.LLM`` with Sequoia, used by nobody else.
            temperature, top_p: Sampling of every request; temperature 0 is greedy.
            batch_size: Requests at once.
            on_checkpoint: Called with each new checkpoint.

        Returns:
            What ended it.
        """
        llm.collective_rpc("sequoia_stats", args=(True, False))
        last = time.monotonic()
        while True:
            self._fill(llm.llm_engine, temperature, top_p, batch_size)
            if self._running:
                self._step(llm.llm_engine)
                if not self._is_due(last):
                    continue
            self._take_checkpoint(llm)
            on_checkpoint(self.checkpoint)
            last = time.monotonic()
            if stopped_by := self._stopped_by():
                return stopped_by

    def _is_due(self, last: float) -> bool:
        """Whether enough time has passed, or tokens been generated; soon at the beginning."""
        return (
            time.monotonic() - last >= self._interval
            or self._start.tokens + self._generated >= self._budget.tokens
            or self.checkpoint.counters.trees == self._start.trees
        )

    def _fill(self, engine: Any, temperature: float, top_p: float, batch_size: int) -> None:
        from vllm import SamplingParams

        while len(self._running) < batch_size and (new := self._workload.next()):
            # No seed: a seeded request is verified by matching, not by Algorithm 2.
            params = SamplingParams(
                temperature=temperature,
                top_p=top_p,
                max_tokens=self._workload.tokens_left(new),
                detokenize=False,
            )
            name = str(self._workload.started)
            self._running[name] = new
            [prompt] = engine.renderer.render_cmpl([{"prompt_token_ids": new.tokens}])
            engine.add_request(name, prompt, params)

    def _step(self, engine: Any) -> None:
        for output in engine.step():
            tokens = output.outputs[0].token_ids
            self._generated += len(tokens) - self._seen.get(output.request_id, 0)
            self._seen[output.request_id] = len(tokens)
            completion = self._running[output.request_id]
            self._workload.update(completion, tokens)
            if output.finished:
                ended = output.outputs[0].finish_reason == "stop"
                self._workload.finish(self._running.pop(output.request_id), ended)
                del self._seen[output.request_id]

    def _take_checkpoint(self, llm: Any) -> None:
        stats = llm.collective_rpc("sequoia_stats", args=(False, False))[0]
        counted = {name: stats[name][: self._depth] for name in ("offered", "accepted")}
        stats = {**stats, **counted}
        self.checkpoint = Checkpoint(self._start.plus(stats), self._workload.state())

    def _stopped_by(self) -> StoppedBy | None:
        reached = self.checkpoint.counters.precision()
        if reached is not None and reached <= self._budget.precision:
            return "precision"
        if self._start.tokens + self._generated >= self._budget.tokens:
            return "tokens"
        return None if self._running or self._workload.has_next() else "prompts"
