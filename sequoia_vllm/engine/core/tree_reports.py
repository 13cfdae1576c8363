"""Brings the worker's counts of trees to vLLM's metrics and log, in the front end.

The worker puts the outcome of a step's trees on the model runner's output (`attach_outcome`), which
the executor pickles as a whole. The scheduler also knows how many drafts the batch size allows. If
statistics are on, it puts both on those that vLLM sends to the front end with each step. There, off
the engine's path, a stat logger counts and reports them.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core.adapting import adapter_of, freeze
from sequoia_vllm.engine.core.core_messages import keep_drafts
from sequoia_vllm.engine.core.eligibility import reasons_of_new
from sequoia_vllm.metrics.counts import TreeCounts, interval_line
from sequoia_vllm.metrics.prometheus import PrometheusKinds, Reason, TreeMetrics
from sequoia_vllm.metrics.watch import Watch
from sequoia_vllm.tree import TokenTree

logger = logging.getLogger("vllm.sequoia")

REPORT = "sequoia_report"  # field that is added to SchedulerStats
_OUTCOME = "sequoia_outcome"  # set on a step's ModelRunnerOutput
_LIMIT = "sequoia_draft_limit"  # set on a scheduler while drafts are limited
_CHECKSUM = "_sequoia_checksum"  # set on a scheduler

_shown: TreeMetrics | None = None  # in vLLM's registry, which has one engine's metrics at a time


@dataclass(frozen=True)
class StepReport:
    """The report of a step to the front end.

    Attributes:
        drafts: Drafts per request at its batch size, trials left out; None: no request was
            scheduled.
        paths: Its verified trees, for `TreeCounts.from_bytes`; empty: there was none.
        undrafted: The reason of each request that began with it and has no drafts.
        speedup: Against no drafts, as measured while serving; None: not known.
        tree: `TokenTree.checksum` of the tree that they are of; 0 without paths.
        has_failed: Whether the draft has: the engine drafts no more.
        requests: Requests in the step.
    """

    drafts: int | None
    paths: bytes
    undrafted: list[Reason] = dataclasses.field(default_factory=list)
    speedup: float | None = None
    tree: int = 0
    has_failed: bool = False
    requests: int = 0


def add_report_field() -> None:
    """Adds the field `REPORT` to vLLM's statistics message, None by default; idempotent.

    It must be there before the process makes its first decoder of that message,
    which drops fields that it does not know.
    """
    if REPORT in SchedulerStats.__dataclass_fields__:
        return
    annotation = StepReport | None
    # Not in __init__: vLLM's generated one does not take it.
    field = dataclasses.field(default=None, init=False)
    made = dataclasses.make_dataclass("Made", [(REPORT, annotation, field)])
    setattr(SchedulerStats, REPORT, None)
    SchedulerStats.__annotations__[REPORT] = annotation
    [SchedulerStats.__dataclass_fields__[REPORT]] = dataclasses.fields(made)


# -- in the worker -----------------------------------------------------------------------


def attach_outcome(
    output: Any, paths: bytes, limit: int | None = None, has_failed: bool = False
) -> Any:
    """``output`` of a model runner, carrying what became of the step's trees.

    Args:
        output: None or vLLM's. An asynchronous one becomes its ``model_runner_output``; the empty
            one is all engines', and carries nothing.
        paths: Verified trees, for `TreeCounts.from_bytes`.
        limit: Most drafts to schedule per request while a measuring tool, or a draft that failed,
            limits them.
        has_failed: Whether the draft has.
    """
    if output is not None and output is not EMPTY_MODEL_RUNNER_OUTPUT:
        carrier = getattr(output, "model_runner_output", output)
        setattr(carrier, _OUTCOME, (paths, limit, has_failed))
    return output


# -- in the engine core --------------------------------------------------------------------


def _limit_drafts(scheduler: Any, limit: int | None) -> None:
    """Ends adaptation and schedules at most ``limit`` drafts from now on; None: no change."""
    if limit is None or getattr(scheduler, _LIMIT, None) == limit:
        return
    freeze(scheduler)
    whole = getattr(scheduler, "_sequoia_whole_schedule", scheduler.dynamic_sd_lookup)
    scheduler._sequoia_whole_schedule = whole
    scheduler.dynamic_sd_lookup = [min(drafts, limit) for drafts in whole]
    setattr(scheduler, _LIMIT, limit)


def update_from_output(
    original: Callable[..., Any], self: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """Updates like the scheduler, and adds the step's report to its statistics if it makes any."""
    started = time.perf_counter()
    paths, limit, has_failed = getattr(model_runner_output, _OUTCOME, (b"", None, False))
    served = _without_ended(self, scheduler_output, model_runner_output, paths)
    outputs = original(self, scheduler_output, model_runner_output)
    keep_drafts(self, model_runner_output)
    _limit_drafts(self, limit)
    if not SequoiaSettings.enabled(self.vllm_config):
        return outputs
    if (adapter := adapter_of(self)) is not None:
        adapter.follow(scheduler_output, paths, _gained(outputs), started, bool(self.running))
    if getattr(self, "spec_decode_metrics_level", "none") != "none":
        _end_histograms(self.vllm_config, outputs)
    undrafted = reasons_of_new(self, scheduler_output)
    if not self.log_stats:
        return outputs
    for output in outputs.values():
        if output.scheduler_stats is not None:  # vLLM gives them to one front end
            requests = len(scheduler_output.num_scheduled_tokens)
            drafts = scheduler_output.num_spec_tokens_to_schedule if requests else None
            if adapter is not None and requests:
                drafts = adapter.controller.decided(requests)
            tree = _checksum(self) if served else 0
            speedup = None if adapter is None else adapter.controller.speedup
            report = StepReport(drafts, served, undrafted, speedup, tree, has_failed, requests)
            setattr(output.scheduler_stats, REPORT, report)
            break
    return outputs


def _without_ended(scheduler: Any, scheduled: Any, output: Any, paths: bytes) -> bytes:
    """Leaves out trees of requests that were aborted while the step ran.

    Nobody gets their tokens, and vLLM counts none of them. Where the paths are of another step
    than ``output``, all are kept.
    """
    if not paths:
        return paths
    drafts = scheduled.scheduled_spec_decode_tokens
    requests = [scheduler.requests.get(i) for i in output.req_ids if drafts.get(i)]
    kept = [request is not None and not request.is_finished() for request in requests]
    if all(kept):
        return paths
    size = TreeCounts.path_bytes(SequoiaSettings.of(scheduler.vllm_config).tree)
    if len(paths) != size * len(kept):
        return paths
    return b"".join(paths[i * size : (i + 1) * size] for i, keeps in enumerate(kept) if keeps)


def _gained(outputs: dict[int, Any]) -> int:
    """Tokens that the front ends receive of a step, beyond one for each request."""
    new = [len(one.new_token_ids) for output in outputs.values() for one in output.outputs]
    return sum(new) - sum(map(bool, new))


def _end_histograms(vllm_config: Any, outputs: Any) -> None:
    """Ends histograms of vLLM's ``--per-request-spec-decode-metrics`` at the tree's depth.

    vLLM gives each a place for every drafted node. A path accepts at most one node of a level.
    """
    finished = [
        one.spec_decode_metrics
        for output in outputs.values()
        for one in output.outputs
        if one.spec_decode_metrics is not None
    ]
    if finished:
        depth = SequoiaSettings.of(vllm_config).tree.depth
        for metrics in finished:
            del metrics.histogram[depth + 1 :]


def _checksum(scheduler: Any) -> int:
    """Checksum of the engine's tree, computed once: the configuration has the tree as JSON data."""
    if not hasattr(scheduler, _CHECKSUM):
        setattr(scheduler, _CHECKSUM, SequoiaSettings.of(scheduler.vllm_config).tree.checksum)
    checksum: int = getattr(scheduler, _CHECKSUM)
    return checksum


# -- in the front end ------------------------------------------------------------------------


def init_stat_logger_manager(
    original: Callable[..., None], self: Any, *args: Any, **kwargs: Any
) -> None:
    """Calls vLLM's, then adds a logger of trees for Sequoia's engines."""
    global _shown
    original(self, *args, **kwargs)
    if _shown is not None:
        _shown.unregister()  # as vLLM did with its own
        _shown = None
    given = inspect.signature(original).bind(self, *args, **kwargs)
    given.apply_defaults()
    vllm_config = given.arguments["vllm_config"]
    if not SequoiaSettings.enabled(vllm_config):
        return
    settings = SequoiaSettings.of(vllm_config)
    model_name = vllm_config.model_config.served_model_name
    engines = self.engine_indexes
    kinds = _own_kinds(given.arguments["custom_stat_loggers"])
    _shown = TreeMetrics(
        settings.tree, settings.tree_source, model_name, engines, kinds, settings.expected_speedup
    )
    # Where vLLM writes no interval lines, we write none: each front end knows only its share.
    logs = given.arguments["enable_default_loggers"] and given.arguments["client_count"] == 1
    aggregate = given.arguments["aggregate_engine_logging"]
    self.stat_loggers.append(TreeStatLogger(settings.tree, engines, _shown, logs, aggregate))


def _own_kinds(stat_loggers: Sequence[Any] | None) -> LoggerKinds | None:
    """Metric classes of a logger that shows vLLM's metrics elsewhere, like Ray Serve's; or None."""
    for factory in stat_loggers or ():
        is_shown = isinstance(factory, type) and issubclass(factory, PrometheusStatLogger)
        if is_shown and factory._counter_cls is not PrometheusStatLogger._counter_cls:
            return LoggerKinds(factory)
    return None


class LoggerKinds(PrometheusKinds):
    """Makes metrics as a logger makes vLLM's: for Ray's ``ray_sequoia_...``, by replica.

    This process does not export them, so their names need not be freed.
    """

    def __init__(self, logger_class: type[PrometheusStatLogger]) -> None:
        super().__init__()
        self._class = logger_class

    def counter(self, name: str, documentation: str, labels: list[str]) -> Any:
        """A counter like those of vLLM that this logger shows."""
        return self._class._counter_cls(name, documentation, labels)

    def gauge(self, name: str, documentation: str, labels: list[str]) -> Any:
        """A gauge like those of vLLM that this logger shows."""
        return self._class._gauge_cls(name, documentation, labels)

    def remove(self, gauge: Any, labels: Sequence[str]) -> None:
        """Makes a gauge NaN: those of Ray cannot be removed."""
        gauge.labels(*labels).set(math.nan)


def get_metrics(original: Callable[..., list[Any]], self: Any) -> list[Any]:
    """Returns vLLM's metrics, whose names start with ``vllm:``, and the trees'."""
    return [*original(self), *(_read(_shown) if _shown is not None else [])]


def _read(metrics: TreeMetrics) -> list[Any]:
    return [
        reader.Counter(family.name, sample.labels, int(sample.value))
        if family.type == "counter"
        else reader.Gauge(family.name, sample.labels, sample.value)
        for family in metrics.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


class TreeStatLogger(AggregateStatLoggerBase):
    """Shows the reports of one or more engines: as metrics, and as a line per interval.

    The metrics are at most a second old while requests run, and exact when none does.

    Args:
        tree: The engines' tree.
        engine_indexes: Theirs.
        metrics: Where to show them.
        logs: Whether to write interval lines.
        aggregate: One line for all engines, not one for each.
    """

    def __init__(
        self,
        tree: TokenTree,
        engine_indexes: Sequence[int],
        metrics: TreeMetrics,
        logs: bool,
        aggregate: bool,
    ) -> None:
        self._tree = tree
        self._metrics = metrics
        self._logs = logs
        self._aggregate = aggregate
        self._interval = {engine: TreeCounts.zeros(tree) for engine in engine_indexes}
        self._drafts: dict[int, tuple[int, int]] = {}  # and the requests of that step
        self._speedup: dict[int, float] = {}
        self._watch = Watch(metrics)
        self._others: set[int] = set()  # engines that draft another tree
        self._failed: set[int] = set()  # engines whose draft has failed

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Takes what one engine's step sent."""
        report = getattr(scheduler_stats, REPORT, None)
        if report is None or engine_idx not in self._interval:
            return
        assert scheduler_stats is not None
        counts = self._counts_of(report, engine_idx) if report.paths else None
        if counts is not None:
            self._interval[engine_idx].add(counts)
        if report.drafts is not None:
            self._drafts[engine_idx] = report.drafts, report.requests
        if report.speedup is not None:
            self._speedup[engine_idx] = report.speedup
        if report.has_failed and engine_idx not in self._failed:
            self._failed.add(engine_idx)
            self._metrics.failures[engine_idx].inc()
        self._metrics.observe(engine_idx, counts, report.drafts, report.undrafted, report.speedup)
        if scheduler_stats.num_running_reqs == 0:
            self._metrics.flush(engine_idx)
        if report.drafts is not None:
            self._watch.note_step(engine_idx)

    def _counts_of(self, report: StepReport, engine: int) -> TreeCounts | None:
        """Counts of a report's paths; None if another tree than this front end's was drafted.

        Data-parallel engines on other nodes have configurations of their own (``--headless``). An
        error raised here would end all requests.
        """
        if report.tree == self._tree.checksum:
            return TreeCounts.from_bytes(self._tree, report.paths)
        if engine not in self._others:
            self._others.add(engine)
            logger.warning(
                "Sequoia: engine %d drafts another tree than the one configured here, and is not "
                'counted in metrics of trees: give "tree" alike wherever engines are started, or '
                "one directory of trees ($SEQUOIA_VLLM_TREES)",
                engine,
            )
        return None

    def log(self) -> None:
        """Writes the line of the interval that ends now."""
        if self._logs:
            self._log_interval()
        for engine, counts in self._interval.items():
            self._metrics.flush(engine)
            counts.clear()

    def _log_interval(self) -> None:
        for engine in sorted(self._failed):
            logger.warning("Sequoia: engine %03d: no drafts since the draft model failed", engine)
        if self._aggregate:
            total = TreeCounts.zeros(self._tree)
            for counts in self._interval.values():
                total.add(counts)
            drafts = max(self._drafts.values(), default=None)
            speedup = fmean(self._speedup.values()) if self._speedup else None
            lines = {f"{len(self._interval)} engines": (total, drafts, speedup)}
        else:
            lines = {
                f"engine {engine:03d}": (
                    counts, self._drafts.get(engine), self._speedup.get(engine)
                )
                for engine, counts in self._interval.items()
            }  # fmt: skip
        for engines, shown in lines.items():
            if (line := interval_line(self._tree, *shown)) is not None:
                logger.info("Sequoia: %s: %s", engines, line)

    def log_engine_initialized(self) -> None:
        """Does nothing: the tree was logged when it was chosen."""
