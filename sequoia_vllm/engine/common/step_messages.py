"""What became of a step's trees, on its way from the worker to the engine core and the front end.

The worker puts a `StepOutcome` on the model runner's output. The engine core puts a `StepReport` on
the statistics that vLLM sends to the front end with each step, if statistics are on. Where it takes
one step at a time, drafts come with the sampled tokens.

The other way go requests that begin on keys which a KV connector loaded. A connector may have
stored a block before the draft read its tokens. So a draft model reads them again.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from sequoia_vllm.adaptation.step_times import Timed
from sequoia_vllm.metrics.prometheus import Reason

REPORT = "sequoia_report"  # field that is added to SchedulerStats
PREDICTED = "sequoia_predicted"  # field that is added to RequestSpecDecodeMetrics
Predicted = tuple[int, int, int]  # the fields of a request's `PredictionCounts` so far
_OUTCOME = "sequoia_outcome"  # set on a step's ModelRunnerOutput
_LOADED = "sequoia_loaded"  # set on its SchedulerOutput, which executors pickle as a whole


@dataclass(frozen=True)
class StepOutcome:
    """What a worker says of a step."""

    paths: bytes = b""  # verified trees, for `TreeCounts.from_bytes`
    limit: int | None = None  # most drafts per request, by a measuring tool or a draft that failed
    has_failed: bool = False  # whether the draft has
    drafts: Any = None  # vLLM's `DraftTokenIds` of the step; None: the engine core must ask
    drafting: tuple[float, ...] | None = None
    """Seconds from the outcomes of steps to the ends of their drafting, of the steps that have
    ended since, in order; None: outcomes come after drafting."""
    drafted: float = 0.0  # seconds of drafting before the outcome
    times: Sequence[Timed] = ()  # of decode steps, if the worker timed graphs; the first says it
    predicted: Mapping[str, Predicted] = dataclasses.field(default_factory=dict)  # by request
    is_told: bool = False  # whether it scored branches of told tokens, or made them
    branches: frozenset[str] = frozenset()
    """Requests with a grammar whose ``drafts`` are a chain, not the engine's tree."""


@dataclass(frozen=True)
class StepReport:
    """The report of a step to the front end."""

    drafts: int | None
    """Drafts per request at its batch size, probes left out; None: no request was scheduled."""
    paths: bytes  # its verified trees, for `TreeCounts.from_bytes`; empty: there was none
    undrafted: list[Reason] = dataclasses.field(default_factory=list)
    """The reason of each request that began with it and has no drafts."""
    speedup: float | None = None  # against no drafts, as measured while serving; None: not known
    tree: int = 0  # `TokenTree.checksum` of the tree that they are of; 0 without paths
    has_failed: bool = False  # whether the draft has: the engine drafts no more
    requests: int = 0  # requests in the step


def attach_outcome(output: Any, outcome: StepOutcome) -> Any:
    """A model runner's ``output``, None or vLLM's, with what became of the step's trees.

    An asynchronous one becomes its ``model_runner_output``; the empty one is all engines'.
    """
    if output is not None and output is not EMPTY_MODEL_RUNNER_OUTPUT:
        setattr(getattr(output, "model_runner_output", output), _OUTCOME, outcome)
    return output


def outcome_of(output: Any) -> StepOutcome:
    """What `attach_outcome` put there, or nothing."""
    found: StepOutcome = getattr(output, _OUTCOME, StepOutcome())
    return found


def attach_predicted(output: Any, counts: Predicted) -> None:
    """Puts a request's counts on vLLM's output of a step.

    It is every step's: where a stop string ends a request, the front end is told nothing later.
    """
    if output.spec_decode_metrics is None:
        output.spec_decode_metrics = RequestSpecDecodeMetrics(num_spec_tokens=0)
    setattr(output.spec_decode_metrics, PREDICTED, counts)


def add_fields() -> None:
    """Adds the fields `REPORT` and `PREDICTED` to vLLM's messages, None by default; idempotent.

    It must come before the process's first decoder, which drops fields that it does not know.
    """
    if REPORT in SchedulerStats.__dataclass_fields__:
        return
    # Takes the counts of trees to the front end; decoders drop fields they do not know.
    setattr(SchedulerStats, REPORT, None)
    _declare(SchedulerStats, REPORT, StepReport | None)
    # Takes the counts of a request's prediction to the front end, for each of its answers.
    setattr(RequestSpecDecodeMetrics, PREDICTED, None)
    _declare(RequestSpecDecodeMetrics, PREDICTED, Predicted | None)


def _declare(message: Any, name: str, annotation: Any) -> None:
    # Not in __init__: vLLM's generated one does not take it.
    field = dataclasses.field(default=None, init=False)
    made = dataclasses.make_dataclass("Made", [(name, annotation, field)])
    message.__annotations__[name] = annotation
    [message.__dataclass_fields__[name]] = dataclasses.fields(made)


def mark_loaded(scheduler_output: Any, requests: Collection[str]) -> None:
    """Tells workers which requests have loaded keys, for the step in which they begin."""
    setattr(scheduler_output, _LOADED, frozenset(requests))


def is_loaded(scheduler_output: Any, request_id: str) -> bool:
    """Whether the request begins on loaded keys."""
    return request_id in getattr(scheduler_output, _LOADED, ())
