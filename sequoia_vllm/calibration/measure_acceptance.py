"""Counts how often the verifier accepts drafts on a live engine."""

import datetime
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from sequoia_vllm.calibration.acceptance_task import (
    AcceptanceTask,
    add_counts,
    estimate_acceptance,
    precision,
)
from sequoia_vllm.drafters.registry import draft_option, drafts_from_text
from sequoia_vllm.library.files import AcceptanceFile, CalibrationState
from sequoia_vllm.measuring.engines import Progress, open_engine, room_for
from sequoia_vllm.measuring.interrupts import last_interrupt
from sequoia_vllm.measuring.provenance import provenance, settings_as_data, synthetic_models
from sequoia_vllm.prompts import source_name


def measure_acceptance(
    task: AcceptanceTask,
    previous: CalibrationState | None = None,
    progress: Progress | None = None,
    save: Callable[[AcceptanceFile], None] | None = None,
    *,
    checkpoint_seconds: float = 1.0,
) -> AcceptanceFile:
    """Runs the engine with a wide tree and counts accepted nodes.

    Args:
        previous: Where an earlier run stopped; None: start anew.
        save: Called with the counts so far, marked incomplete, at each checkpoint.
        checkpoint_seconds: Time between checkpoints; 0: after every step.

    Returns:
        The measurement, marked incomplete if a KeyboardInterrupt ended it after some trees.

    Raises:
        CalibrationError: The models cannot be used.
    """
    run = _Run(task, previous, checkpoint_seconds)
    report = progress or (lambda what, done, total: None)

    def on_checkpoint(state: CalibrationState) -> None:
        if state.precision is None:
            return
        known = f"within {state.precision:.3f}, to be {state.wanted_precision:g}"
        # Until the wanted precision is reached, or all tokens are spent.
        left = (state.precision / state.wanted_precision) ** 2
        left = max(1.0, min(left, state.most_tokens / max(1, state.tokens)))
        report(known, state.trees, round(state.trees * left))
        if save is not None:
            save(_file(task, state))

    report("starting the engine", 0, 1)
    with suppress(KeyboardInterrupt), _engine(task, seed=run.state.started) as llm:
        run.generate(llm, on_checkpoint)
    if not run.state.complete and run.state.trees == 0:
        raise last_interrupt()
    return _file(task, run.state)


@dataclass(frozen=True)
class Completion:
    """One request to the engine."""

    prompt: int
    tokens: list[int]  # input of the request: the prompt, then ``before``
    before: list[int]  # tokens of this greedy completion from an earlier run


@dataclass
class Workload:
    """Chooses the next completions: endless passes over the prompts, or one greedy pass.

    Each pass samples anew. A greedy completion would repeat itself; counted twice, it would make
    intervals too narrow. It continues what an earlier run began.
    """

    prompts: Sequence[list[int]]
    greedy: bool
    max_tokens: int
    started: int = 0  # completions started so far, earlier runs included
    completions: dict[int, list[int]] = field(default_factory=dict)
    """Greedy: tokens generated so far, by prompt."""
    ended: set[int] = field(default_factory=set)  # greedy: prompts whose completion ended by itself

    def __post_init__(self) -> None:
        self._waiting = deque(
            prompt
            for prompt in range(len(self.prompts))
            if prompt not in self.ended and len(self.completions.get(prompt, ())) < self.max_tokens
        )

    @property
    def has_next(self) -> bool:
        """True if `next` has a request to give."""
        return not self.greedy or bool(self._waiting)

    def next(self) -> Completion | None:
        """The next request; None: all greedy completions are done or running."""
        if not self.greedy:
            prompt = self.started % len(self.prompts)
        elif self._waiting:
            prompt = self._waiting.popleft()
        else:
            return None
        self.started += 1
        before = self.completions.get(prompt, [])
        return Completion(prompt, [*self.prompts[prompt], *before], before)

    def update(self, completion: Completion, generated: Sequence[int], ended: bool = False) -> None:
        """Notes this request's tokens so far; ``ended``: it stopped before its limit."""
        if self.greedy:
            self.completions[completion.prompt] = [*completion.before, *generated]
            if ended:
                self.ended.add(completion.prompt)

    def state(self) -> dict[str, Any]:
        """The fields of `CalibrationState` with these names."""
        completions = {prompt: list(ids) for prompt, ids in self.completions.items()}
        return {"started": self.started, "completions": completions, "ended": sorted(self.ended)}


class _Run:
    """One engine's part of a measurement; ``state`` is its last checkpoint, with earlier runs."""

    def __init__(
        self, task: AcceptanceTask, previous: CalibrationState | None, interval: float
    ) -> None:
        settings = task.settings
        now = CalibrationState(
            complete=False, stopped_by="interrupt", wanted_precision=settings.precision,
            most_tokens=settings.max_tokens_total, trees=0, tokens=0, offered=[], accepted=[],
            measures=task.measures, started=0,
        )  # fmt: skip
        stops = {"complete", "stopped_by", "wanted_precision", "most_tokens"}
        start = (previous or now).model_copy(update=now.model_dump(include=stops))
        self.state = self._start = start
        self._settings = settings
        self._interval = interval
        self._workload = Workload(
            task.prompts, settings.temperature == 0, settings.max_tokens, start.started,
            dict(start.completions), set(start.ended),
        )  # fmt: skip
        self._running: dict[str, Completion] = {}
        self._generated: dict[str, int] = {}

    def generate(self, llm: Any, on_checkpoint: Callable[[CalibrationState], None]) -> None:
        """Generates until the measurement is complete; nobody else may use this ``LLM``."""
        llm.collective_rpc("sequoia_stats", args=(True, False))
        last, stopped_by = time.monotonic(), None
        while stopped_by is None:
            self._fill(llm.llm_engine)
            if self._running:
                self._step(llm.llm_engine)
                if not self._is_due(last):
                    continue
            self._take_checkpoint(llm)
            on_checkpoint(self.state)
            last, stopped_by = time.monotonic(), self._stopped_by()
        # A complete greedy run is never continued, so its completions can go.
        self.state = self.state.model_copy(
            update={"complete": True, "stopped_by": stopped_by, "completions": {}}
        )

    def _tokens(self) -> int:
        """Tokens generated by this and earlier runs."""
        return self._start.tokens + sum(self._generated.values())

    def _is_due(self, last: float) -> bool:
        """True if a checkpoint is due by time or tokens, or no tree was verified yet."""
        return (
            time.monotonic() - last >= self._interval
            or self._tokens() >= self._settings.max_tokens_total
            or self.state.trees == self._start.trees
        )

    def _fill(self, engine: Any) -> None:
        from vllm import SamplingParams

        settings = self._settings
        while len(self._running) < settings.batch_size and (new := self._workload.next()):
            # No seed: seeded requests are verified by matching, not by Algorithm 2.
            params = SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_tokens=settings.max_tokens - len(new.before),
                detokenize=False,
            )
            name = str(self._workload.started)
            self._running[name] = new
            [prompt] = engine.renderer.render_cmpl([{"prompt_token_ids": new.tokens}])
            engine.add_request(name, prompt, params)

    def _step(self, engine: Any) -> None:
        for output in engine.step():
            name, [completion] = output.request_id, output.outputs
            self._generated[name] = len(completion.token_ids)
            ended = output.finished and completion.finish_reason == "stop"
            self._workload.update(self._running[name], completion.token_ids, ended)
            if output.finished:
                del self._running[name]

    def _take_checkpoint(self, llm: Any) -> None:
        """Reads the engine's counters (`StepStats.to_dict`) and the workload together."""
        stats = llm.collective_rpc("sequoia_stats", args=(False, False))[0]
        depth = self._settings.depth if self._settings.tree is None else None
        trees = self._start.trees + stats["tree_steps"]
        offered = add_counts(self._start.offered, stats["offered"][:depth])
        accepted = add_counts(self._start.accepted, stats["accepted"][:depth])
        known = precision(estimate_acceptance(offered, accepted)) if trees else None
        self.state = self._start.model_copy(
            update={
                "trees": trees, "tokens": self._start.tokens + stats["tokens"],
                "offered": offered, "accepted": accepted, "precision": known,
                **self._workload.state(),
            }
        )  # fmt: skip

    def _stopped_by(self) -> Literal["precision", "tokens", "prompts"] | None:
        """The reason to stop at this checkpoint; None: go on."""
        reached = self.state.precision
        if reached is not None and reached <= self._settings.precision:
            return "precision"
        if self._tokens() >= self._settings.max_tokens_total:
            return "tokens"
        return None if self._running or self._workload.has_next else "prompts"


def _file(task: AcceptanceTask, state: CalibrationState) -> AcceptanceFile:
    settings, engine = task.settings, task.settings.engine
    estimate = estimate_acceptance(state.offered, state.accepted)
    shape = slice(None) if len(estimate.acceptance) > 1 else 0
    sampled, tree = settings.temperature > 0, settings.tree
    how = f"temperature {settings.temperature:g}" if sampled else "greedy"
    if sampled and settings.top_p < 1:
        how += f", top-p {settings.top_p:g}"
    if tree is not None:
        how += f", {settings.verification} on a tree of {tree.size} nodes"
    prompts, unfinished = source_name(settings.prompts), "" if state.complete else " (interrupted)"
    shown = {"prompts": prompts} | ({} if tree is None else {"tree": list(tree.parents)})
    return AcceptanceFile(
        name=task.name,
        description=f"{engine.target} with {engine.draft}, {how}, {state.trees} trees on "
        f"{prompts} prompts{unfinished}.",
        source="measured",
        date=datetime.datetime.now(datetime.UTC).date(),
        target=engine.target,
        draft=engine.draft,
        temperature=settings.temperature,
        top_p=settings.top_p if sampled else None,
        acceptance=estimate.acceptance[shape],
        trials=estimate.trials[shape],
        low=estimate.low[shape],
        high=estimate.high[shape],
        calibration=state,
        provenance=provenance(
            settings=settings_as_data(settings, **shown),
            grown=synthetic_models(engine.target, engine.draft),
        ),
    )


def _engine(task: AcceptanceTask, seed: int) -> AbstractContextManager[Any]:
    settings, tree = task.settings, task.tree
    longest = max(map(len, task.prompts)) + settings.max_tokens + tree.size
    speculation = {
        "method": "sequoia", **draft_option(settings.engine.draft),
        "tree": {"parents": list(tree.parents)}, "verification": settings.verification,
        # A model's vector is the draft's alone. Without a model, text is a part of the draft.
        "retrieval": drafts_from_text(settings.engine.draft),
        # Draft the whole tree at every batch size.
        "num_speculative_tokens_per_batch_size": [(1, 1, tree.num_speculative_tokens)],
    }  # fmt: skip
    return open_engine(
        settings.engine, seed=seed, speculative_config=speculation, enable_prefix_caching=False,
        **room_for(longest, settings.batch_size, tree.size),
    )  # fmt: skip
