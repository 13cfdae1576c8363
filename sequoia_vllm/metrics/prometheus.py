"""Prometheus metrics of the trees of one or more engines."""

import contextlib
import math
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.values import MutexValue, ValueClass

from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import TokenTree

_LABELS = ("model_name", "engine")  # as vLLM's

Reason = Literal[
    "asked", "structured_outputs",
    "custom_logits_processors", "no_generation", "longer_than_draft",
    "max_tokens",
]  # fmt: skip
"""Why a request has no drafts: it asked for none, is too short, or has what trees cannot serve."""


class PrometheusKinds:
    """Makes metrics of prometheus_client, as vLLM's server exports them."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._made: list[Counter | Gauge] = []

    def make(self, is_gauge: bool, *described: Any) -> Any:
        """A counter or gauge of prometheus_client's form, from name, documentation and labels."""
        more = {"multiprocess_mode": "mostrecent"} if is_gauge else {}
        kind: Any = Gauge if is_gauge else Counter
        self._made.append(kind(*described, registry=self._registry, **more))
        return self._made[-1]

    def remove(self, gauge: Any, labels: Sequence[str]) -> None:
        """Makes a gauge absent; it is NaN where each process writes metrics into its own file."""
        if ValueClass is MutexValue:
            gauge.remove(*labels)
        else:
            gauge.labels(*labels).set(math.nan)

    def collect(self) -> list[Metric]:
        """All metrics that were made, for readers in this process."""
        return [family for made in self._made for family in made.collect()]

    def unregister(self) -> None:
        """Frees their names."""
        for made in self._made:
            with contextlib.suppress(KeyError):  # somebody else did
                self._registry.unregister(made)


HELP = {
    "trees": "Trees of drafts that were verified: one for each request and step with drafts.",
    "emitted_tokens": "Tokens that verified trees emitted: accepted drafts, and one for each tree.",
    "accepted_depth": "Verified trees of which exactly this many drafts were accepted, by depth.",
    "offered_children": "Drafts on accepted paths that verification could accept, by depth in the "
    "tree (1: below the root) and rank among siblings (1: first).",
    "accepted_children": "Drafts that verification accepted, by depth in the tree and by rank "
    "among siblings.",
    "undrafted_requests": "Requests that are served without drafts, by reason.",
    "draft_failures": "Errors of the draft model; after the first the engine drafts no more.",
    "tree_info": "1, labelled with size (nodes, root included), depth and source of the tree.",
    "drafted_nodes": "Tokens drafted per request and step at this load; 0: speculation is off; "
    "absent while idle.",
    "expected_speedup": "Speed with drafts over plain decoding that was expected at start, for "
    "one request.",
    "measured_speedup": "Speed with drafts over plain decoding, measured over the last seconds; "
    "absent while idle.",
}  # the text of each metric, by its name after ``sequoia:``; ``docs/metrics.md`` says more


class TreeMetrics:
    """The metrics in `HELP`, with vLLM's labels and their own. Any thread may call.

    Counts of a step are small integers that `observe` adds up; `flush` brings the many counters up
    to date. Gauges of the present load are there from an engine's first step until `rest`.

    Args:
        source: Where the tree came from, for the log; the label is its first clause.
        kinds: Makes counters and gauges.
        expected_speedup: Over plain decoding, for one request; None: not known.
    """

    def __init__(
        self,
        tree: TokenTree,
        source: str,
        model_name: str,
        engines: Sequence[int],
        kinds: PrometheusKinds | None = None,
        expected_speedup: float | None = None,
    ) -> None:
        self._kinds = kinds or PrometheusKinds()
        self._lock = threading.Lock()
        self._pending = {engine: TreeCounts(tree) for engine in engines}
        self._labels = {engine: (model_name, str(engine)) for engine in engines}
        self._counters = self._make_counters(tree)
        undrafted = self._counter("undrafted_requests", "reason")
        self._undrafted = {
            (engine, reason): undrafted.labels(*labels, reason)
            for engine, labels in self._labels.items()
            for reason in get_args(Reason)
        }
        failures = self._counter("draft_failures")
        self.failures = {e: failures.labels(*labels) for e, labels in self._labels.items()}
        info = self._gauge("tree_info", "size", "depth", "source")
        for labels in self._labels.values():
            info.labels(*labels, tree.size, tree.depth, first_clause(source)).set(1)
        self._drafted = self._gauge("drafted_nodes")
        expected = self._gauge("expected_speedup")
        self._measured = self._gauge("measured_speedup")
        if expected_speedup is not None:
            for labels in self._labels.values():
                expected.labels(*labels).set(expected_speedup)

    def observe(
        self,
        engine: int,
        counts: TreeCounts | None,
        drafts: int | None,
        undrafted: Sequence[Reason] = (),
        speedup: float | None = None,
    ) -> None:
        """Takes one step's report: nodes drafted per request (None: no request was scheduled), and
        the reason of each request that began and has no drafts."""
        labels = self._labels[engine]
        with self._lock:
            for reason in undrafted:
                self._undrafted[engine, reason].inc()
            if counts is not None:
                self._pending[engine].add(counts)
            if drafts is not None:
                self._drafted.labels(*labels).set(drafts)
                if speedup is not None:
                    self._measured.labels(*labels).set(speedup)

    def flush(self, engine: int) -> None:
        """Makes the counters show everything observed."""
        pending = self._pending[engine]
        counters = self._counters[engine]
        with self._lock:
            for index in counters.keys() & np.flatnonzero(pending.values).tolist():
                counters[index].inc(int(pending.values[index]))
            pending.clear()

    def rest(self, engine: int) -> None:
        """Takes away the gauges of an engine's load, as it has none."""
        with self._lock:
            for gauge in (self._drafted, self._measured):
                self._kinds.remove(gauge, self._labels[engine])

    def collect(self) -> list[Metric]:
        """The metrics with everything observed, as this process shows them."""
        for engine in self._labels:
            self.flush(engine)
        return self._kinds.collect()

    def unregister(self) -> None:
        """Makes room for the metrics of another engine."""
        self._kinds.unregister()

    def _counter(self, name: str, *labels: str) -> Any:
        return self._kinds.make(False, f"sequoia:{name}", HELP[name], [*_LABELS, *labels])

    def _gauge(self, name: str, *labels: str) -> Any:
        return self._kinds.make(True, f"sequoia:{name}", HELP[name], [*_LABELS, *labels])

    def _make_counters(self, tree: TokenTree) -> dict[int, dict[int, Any]]:
        """By engine, the counter of each entry of `TreeCounts.values`. All exist from the start,
        except pairs of depth and child that the tree has nowhere."""
        trees = self._counter("trees")
        tokens = self._counter("emitted_tokens")
        depths = self._counter("accepted_depth", "depth")
        offered = self._counter("offered_children", "depth", "child")
        accepted = self._counter("accepted_children", "depth", "child")
        # A vector of its own indexes tells where each count lies.
        index = TreeCounts(tree)
        index.values[:] = np.arange(len(index.values))
        found: dict[int, dict[int, Any]] = {}
        for engine, labels in self._labels.items():
            own = {index.trees: trees.labels(*labels), index.tokens: tokens.labels(*labels)}
            for depth in range(tree.depth + 1):
                own[int(index.depth_counts[depth])] = depths.labels(*labels, depth)
            for depth, child in zip(tree.depths[1:], tree.child_ranks[1:], strict=True):
                pair = (*labels, depth, child + 1)
                own[int(index.offered[depth - 1, child])] = offered.labels(*pair)
                own[int(index.accepted[depth - 1, child])] = accepted.labels(*pair)
            found[engine] = own
        return found


def first_clause(text: str) -> str:
    """``text`` up to the first colon or semicolon before a space."""
    return re.split(r"[:;] ", text, maxsplit=1)[0]


_FLUSH_SECONDS = 1.0
_IDLE_SECONDS = 10.0  # without a step: then an engine has no load


class Watch:
    """Flushes the counters of busy engines every second, and takes away gauges of idle ones, in a
    thread that ends when all engines are idle: steps may end at any time."""

    def __init__(self, metrics: TreeMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._stepped: dict[int, float] = {}  # when each engine that is not idle made its last step
        self._has_thread = False

    def note_step(self, engine: int) -> None:
        """Takes note that the engine made a step, which the metrics have observed."""
        with self._lock:
            self._stepped[engine] = time.monotonic()
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self._has_thread:
            time.sleep(_FLUSH_SECONDS)
            with self._lock:
                idle_since = time.monotonic() - _IDLE_SECONDS
                for engine, stepped in list(self._stepped.items()):
                    self._metrics.flush(engine)
                    if stepped <= idle_since:
                        self._metrics.rest(engine)
                        del self._stepped[engine]
                self._has_thread = bool(self._stepped)
