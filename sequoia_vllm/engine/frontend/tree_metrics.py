"""Shows what became of trees, in the front end, and what vLLM counts and shows of our engines."""

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from sequoia_vllm.engine.common.settings import SequoiaSettings, is_tagged
from sequoia_vllm.engine.common.step_messages import REPORT, StepReport
from sequoia_vllm.metrics.counts import TreeCounts, interval_line
from sequoia_vllm.metrics.prometheus import PrometheusKinds, TreeMetrics, Watch
from sequoia_vllm.tree import TokenTree

logger = logging.getLogger("vllm.sequoia")

# Tokens per step below which hardly any draft is accepted, judged by at least so many trees.
_HARDLY_ANY, _FEWEST_TREES = 1.1, 32

_shown: TreeMetrics | None = None  # in vLLM's registry, which has one engine's metrics at a time


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


def _own_kinds(stat_loggers: Sequence[Any] | None) -> "LoggerKinds | None":
    """Metric classes of a logger that shows vLLM's metrics elsewhere, like Ray Serve's; or None."""
    for factory in stat_loggers or ():
        is_shown = isinstance(factory, type) and issubclass(factory, PrometheusStatLogger)
        if is_shown and factory._counter_cls is not PrometheusStatLogger._counter_cls:
            return LoggerKinds(factory)
    return None


class LoggerKinds(PrometheusKinds):
    """Makes metrics as a logger makes vLLM's: for Ray's ``ray_sequoia_...``, by replica."""

    def __init__(self, logger_class: type[PrometheusStatLogger]) -> None:
        super().__init__()
        self._class = logger_class

    def make(self, is_gauge: bool, *described: Any) -> Any:
        """A counter or gauge like those of vLLM that this logger shows."""
        return (self._class._gauge_cls if is_gauge else self._class._counter_cls)(*described)

    def remove(self, gauge: Any, labels: Sequence[str]) -> None:
        """Makes a gauge NaN: those of Ray cannot be removed."""
        gauge.labels(*labels).set(math.nan)


def get_metrics(original: Callable[..., list[Any]], self: Any) -> list[Any]:
    """Returns vLLM's metrics, whose names start with ``vllm:``, and the trees'."""
    ours = [
        reader.Counter(family.name, sample.labels, int(sample.value))
        if family.type == "counter"
        else reader.Gauge(family.name, sample.labels, sample.value)
        for family in (_shown.collect() if _shown is not None else ())
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return [*original(self), *ours]


@dataclass(eq=False)
class TreeStatLogger(AggregateStatLoggerBase):
    """Shows the reports of one or more engines: as metrics, and as a line per interval.

    The metrics are at most a second old while requests run, and exact when none does.
    """

    tree: TokenTree
    engine_indexes: Sequence[int]
    metrics: TreeMetrics
    logs: bool  # whether to write interval lines
    aggregate: bool  # one line for all engines, not one for each

    def __post_init__(self) -> None:
        self._interval = {engine: TreeCounts(self.tree) for engine in self.engine_indexes}
        self._drafts: dict[int, tuple[int, int]] = {}  # and the requests of that step
        self._speedup: dict[int, float] = {}
        self._watch = Watch(self.metrics)
        self._others: set[int] = set()  # engines that draft another tree
        self._failed: set[int] = set()  # engines whose draft has failed
        self._unjudged = dict.fromkeys(self.engine_indexes, (0, 0))  # trees, and tokens
        self._useless: set[int] = set()  # engines whose drafts were hardly ever accepted

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
            self.metrics.failures[engine_idx].inc()
        self.metrics.observe(engine_idx, counts, report.drafts, report.undrafted, report.speedup)
        if scheduler_stats.num_running_reqs == 0:
            self.metrics.flush(engine_idx)
        if report.drafts is not None:
            self._watch.note_step(engine_idx)

    def _counts_of(self, report: StepReport, engine: int) -> TreeCounts | None:
        """Counts of a report's paths; None if another tree than this front end's was drafted.

        Other nodes (``--headless``) have configurations of their own.
        """
        if report.tree == self.tree.checksum:
            return TreeCounts.from_bytes(self.tree, report.paths)
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
        if self.logs:
            self._log_interval()
        for engine, counts in self._interval.items():
            if self.logs:
                self._judge(engine, counts)
            self.metrics.flush(engine)
            counts.clear()

    def _judge(self, engine: int, counts: TreeCounts) -> None:
        """Names drafts that are hardly ever accepted: once, until they are accepted again."""
        trees, tokens = self._unjudged[engine]
        trees, tokens = trees + counts.trees, tokens + counts.tokens
        if trees < _FEWEST_TREES:  # an engine that stopped drafting tries it now and then
            self._unjudged[engine] = trees, tokens
            return
        self._unjudged[engine] = 0, 0
        if tokens >= _HARDLY_ANY * trees:
            self._useless.discard(engine)
        elif engine not in self._useless:
            self._useless.add(engine)
            logger.warning(
                "Sequoia: engine %03d: hardly any draft is accepted (%.2f tokens per step): is the "
                "draft made for this target and its chat template?",
                engine, tokens / trees,
            )  # fmt: skip

    def _log_interval(self) -> None:
        for engine in sorted(self._failed):
            logger.warning("Sequoia: engine %03d: no drafts since the draft model failed", engine)
        if self.aggregate:
            total = TreeCounts(self.tree)
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
            if (line := interval_line(self.tree, *shown)) is not None:
                logger.info("Sequoia: %s: %s", engines, line)

    def log_engine_initialized(self) -> None:
        """Does nothing: the tree was logged when it was chosen."""


def describe(original: Callable[..., str], self: Any) -> str:
    """Describes a configuration as vLLM does, but names the method as users do."""
    text = original(self)
    return text.replace(f"method='{self.method}'", "method='sequoia'") if is_tagged(self) else text


def init_acceptance_counters(
    original: Callable[..., None], self: Any, speculative_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Makes vLLM's counters with a position for each level of a tree, not for each node."""
    if is_tagged(speculative_config):
        depth = SequoiaSettings.on(speculative_config).tree.depth
        speculative_config = SimpleNamespace(num_speculative_tokens=depth)
    original(self, speculative_config, *args, **kwargs)


def is_not_about_ours(record: logging.LogRecord) -> bool:
    """Whether a line of vLLM's log does not warn of our scheduler as of a user's own."""
    return "custom scheduler class sequoia_vllm." not in record.getMessage()
