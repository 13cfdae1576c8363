"""Counting trees, carrying the counts, and showing them as metrics and as a log line."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sequoia_vllm.engine.runner.step_stats import StepStats
from sequoia_vllm.metrics import prometheus
from sequoia_vllm.metrics.counts import TreeCounts, interval_line
from sequoia_vllm.metrics.prometheus import PrometheusKinds, Reason, TreeMetrics
from sequoia_vllm.tree import TokenTree
from tests.support.reference_trees import trees

#      0
#    / | \
#   1  2  5
#  / \  \
# 3   4  6      node 3 has the child 7
TREE = TokenTree((-1, 0, 0, 1, 1, 0, 2, 3))


def observe(stats: StepStats, paths: list[list[int]], sizes: list[int]) -> None:
    """Counts trees of these sizes of which these nodes were accepted."""
    deepest = stats.tree.depths[: max(sizes)].max()
    nodes = np.full((len(paths), deepest), -1)
    for row, path in zip(nodes, paths, strict=True):
        row[: len(path)] = path
    stats.observe(nodes, np.array(sizes))


def counted(*steps: list[list[int]]) -> TreeCounts:
    """The counts of steps that scored the whole of `TREE`."""
    stats = StepStats(TREE)
    for paths in steps:
        observe(stats, paths, [TREE.size] * len(paths))
    return stats.counts


@st.composite
def trees_and_steps(draw):
    tree = draw(trees(12).filter(lambda tree: tree.size > 1))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        step = []
        for _ in range(draw(st.integers(1, 4))):
            size = draw(st.integers(1, tree.size))  # trimmed from the end
            path = [0]
            while (children := [c for c in tree.children[path[-1]] if c < size]) and draw(
                st.booleans()
            ):
                path.append(draw(st.sampled_from(children)))
            step.append((path[1:], size))
        steps.append(step)
    return tree, steps


@given(trees_and_steps(), st.integers(0, 3))
@settings(deadline=None)
def test_counts_are_those_of_a_walk_node_by_node(case, reset_after):
    """However steps are grouped into batches, and across a reset of the worker's own counters."""
    tree, steps = case
    stats = StepStats(tree)
    total = TreeCounts(tree)
    for index, step in enumerate(steps):
        observe(stats, [path for path, _ in step], [size for _, size in step])
        total.add(TreeCounts.from_bytes(tree, stats.take_paths()))
        assert stats.take_paths() == b""
        if index == reset_after:
            stats.reset()

    offered = np.zeros((tree.depth, tree.max_branch), dtype=int)
    accepted = np.zeros_like(offered)
    for path, size in (verified for step in steps for verified in step):
        for depth, node in enumerate([0, *path]):
            for rank, child in enumerate(tree.children[node]):
                offered[depth, rank] += child < size
                accepted[depth, rank] += child in path
    lengths = [len(path) for step in steps for path, _ in step]
    assert total.trees == len(lengths)
    assert total.tokens == len(lengths) + sum(lengths)
    assert total.depth_counts.tolist() == np.bincount(lengths, minlength=tree.depth + 1).tolist()
    assert total.offered.tolist() == offered.tolist()
    assert total.accepted.tolist() == accepted.tolist()


def test_counts_of_another_tree_are_refused():
    stats = StepStats(TREE)
    observe(stats, [[1, 3]], [TREE.size])
    with pytest.raises(ValueError, match=r"depth 2: .* one tree"):
        TreeCounts.from_bytes(TokenTree((-1, 0, 1)), stats.take_paths())


def test_interval_line():
    counts = counted([[1, 3, 7], [2]], [[]])
    # 3 trees emit 4 + 2 + 1 tokens. The root went on in 2 of 3, nodes 1 and 2 in 1 of 2,
    # node 3 always. First children were taken at 3 (0, 1, 3) of the 6 nodes that have one.
    words = (
        "up to 7 drafts, depth 3; 2.33 tokens per step; "
        "accepted by depth 0.67, 0.50, 1.00; by child 0.50, 0.25, 0.00"
    )
    assert interval_line(TREE, counts, None) == words
    assert interval_line(TREE, counts, None, speedup=1.309) == f"{words}; 1.31x plain"


def test_operators_are_told_of_the_interval_line():
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    shown = page.partition("\nSequoia: engine 000: ")[2].partition("\n```")[0]
    pattern = ".+".join(re.escape(part) for part in " ".join(shown.split()).split("..."))
    line = interval_line(TREE, counted([[1, 3, 7], [2]], [[]]), (7, 3), speedup=1.309)
    assert re.fullmatch(pattern, line)


def test_interval_line_of_a_trimmed_tree_and_of_none():
    stats = StepStats(TREE)
    observe(stats, [[2]], [3])
    line = interval_line(TREE, stats.counts, (2, 3))
    assert line == (
        "up to 7 drafts, depth 3 (2 drafts with 3 requests); 2.00 tokens per step; "
        "accepted by depth 1.00; by child 0.00, 1.00"
    )
    assert "depth 3 (no drafts with 1 request); " in interval_line(TREE, stats.counts, (0, 1))
    assert "depth 3 (1 draft with 1 request); " in interval_line(TREE, stats.counts, (1, 1))
    assert interval_line(TREE, TreeCounts(TREE), (7, 1)) is None


def test_dynamic_trees_are_counted_by_node():
    """Their nodes' children are not the engine's tree's, also in what crosses processes."""
    stats = StepStats(TREE)
    nodes, sizes = np.array([[2, 5, -1], [1, 2, 6], [-1, -1, -1]]), np.array([8, 7, 3])
    stats.observe(nodes, sizes, np.array([True, True, True]))
    observe(stats, [[1, 3]], [TREE.size])
    counts = TreeCounts.from_bytes(TREE, stats.take_paths())
    assert (counts.trees, counts.tokens) == (4, 4 + 2 + 3 + 0 + 2)
    assert counts.depth_counts.tolist() == [1, 0, 2, 1]
    assert counts.scored_nodes.tolist() == [3, 3, 3, 2, 2, 2, 2, 1]
    assert counts.accepted_nodes.tolist() == [3, 1, 2, 0, 0, 1, 1, 0]
    alone = counted([[1, 3]])
    assert counts.offered.tolist() == alone.offered.tolist()
    assert counts.accepted.tolist() == alone.accepted.tolist()
    assert counts.values.tolist() == stats.counts.values.tolist()
    registry, metrics = made()
    metrics.observe(0, counts, drafts=None)
    metrics.flush(0)
    assert samples(registry)["sequoia:emitted_tokens_total", "0"] == 11


def test_interval_line_of_dynamic_trees():
    stats = StepStats(TREE)
    stats.observe(np.array([[2, 5], [1, -1], [-1, -1]]), np.array([8, 8, 8]), True)
    line = interval_line(TREE, stats.counts, None)
    assert (
        line == "up to 7 drafts, depth 3; 2.00 tokens per step; accepted by depth 0.67, 0.50, 0.00"
    )


def made(engines=(0,), source="a test", **options) -> tuple[CollectorRegistry, TreeMetrics]:
    registry = CollectorRegistry()
    kinds = PrometheusKinds(registry)
    return registry, TreeMetrics(TREE, source, "model", [*engines], kinds, **options)


def samples(registry: CollectorRegistry) -> dict:
    """Value of every sample, by name and labels other than the model's."""
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "model_name")): (
            sample.value
        )
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_metrics_show_what_was_flushed():
    registry, metrics = made([0, 1])
    start = samples(registry)
    assert start["sequoia:tree_info", "3", "0", "8", "a test"] == 1
    assert ("sequoia:drafted_nodes", "0") not in start  # there is no load yet
    assert {value for key, value in start.items() if key[0].endswith("_total")} == {0}

    for step in ([[1, 3, 7], [2]], [[]]):
        metrics.observe(0, counted(step), drafts=5)
    metrics.observe(0, None, drafts=None)  # a step without trees or requests
    assert samples(registry) == {**start, ("sequoia:drafted_nodes", "0"): 5}
    for _ in range(2):  # nothing is counted twice
        metrics.flush(0)
        found = samples(registry)
        changed = {k: v for k, v in found.items() if start.get(k) != v}
        assert changed == {
            ("sequoia:drafted_nodes", "0"): 5,
            ("sequoia:trees_total", "0"): 3,
            ("sequoia:emitted_tokens_total", "0"): 7,
            ("sequoia:accepted_depth_total", "0", "0"): 1,
            ("sequoia:accepted_depth_total", "1", "0"): 1,
            ("sequoia:accepted_depth_total", "3", "0"): 1,
            # labels: child, depth, engine
            ("sequoia:offered_children_total", "1", "1", "0"): 3,
            ("sequoia:offered_children_total", "2", "1", "0"): 3,
            ("sequoia:offered_children_total", "3", "1", "0"): 3,
            ("sequoia:offered_children_total", "1", "2", "0"): 2,
            ("sequoia:offered_children_total", "2", "2", "0"): 1,
            ("sequoia:offered_children_total", "1", "3", "0"): 1,
            ("sequoia:accepted_children_total", "1", "1", "0"): 1,
            ("sequoia:accepted_children_total", "2", "1", "0"): 1,
            ("sequoia:accepted_children_total", "1", "2", "0"): 1,
            ("sequoia:accepted_children_total", "1", "3", "0"): 1,
        }


def test_source_label_is_short():
    registry, _ = made(source="default size; tree a/b: 1 nodes; 3.01 tokens per step")
    assert samples(registry)["sequoia:tree_info", "3", "0", "8", "default size"] == 1


def test_requests_without_drafts_are_counted_by_reason():
    registry, metrics = made()
    metrics.observe(0, None, drafts=7, undrafted=["asked", "structured_outputs", "asked"])
    counted = dict.fromkeys(get_args(Reason), 0) | {"asked": 2, "structured_outputs": 1}
    name, found = "sequoia:undrafted_requests_total", samples(registry)
    assert {reason: found[name, "0", reason] for reason in counted} == counted


def test_speedups_are_shown_where_they_are_known():
    expected, measured = (("sequoia:expected_speedup", "0"), ("sequoia:measured_speedup", "0"))
    registry = CollectorRegistry()
    kinds = PrometheusKinds(registry)
    metrics = TreeMetrics(TREE, "a test", "model", [0], kinds, expected_speedup=2.5)
    assert samples(registry)[expected] == 2.5
    assert measured not in samples(registry)
    metrics.observe(0, None, drafts=7, speedup=1.9)
    metrics.observe(0, None, drafts=7)
    assert samples(registry)[measured] == 1.9
    metrics.unregister()
    TreeMetrics(TREE, "a test", "model", [0], kinds)
    assert expected not in samples(registry)


def test_metrics_of_a_new_engine_replace_the_old_ones():
    registry, first = made()
    first.unregister()
    assert generate_latest(registry) == b""
    first.unregister()
    TreeMetrics(TREE, "a test", "model", [0], PrometheusKinds(registry))  # no name is taken


GAUGES = ("sequoia:drafted_nodes", "sequoia:measured_speedup")


def eventually(shows) -> bool:
    """Whether it shows so within a minute, on however slow a machine."""
    end = time.monotonic() + 60
    while not shows():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def quick_watch(monkeypatch):
    monkeypatch.setattr(prometheus, "_FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(prometheus, "_IDLE_SECONDS", 0.1)


def test_metrics_stay_current_after_the_last_step(quick_watch):
    """No step comes any more, and nobody reads: counters are complete, gauges of a load go."""
    registry, metrics = made([0, 1], expected_speedup=2.0)
    watched = prometheus.Watch(metrics)
    for round in (1, 2):  # it goes on after a pause
        for engine in (0, 1):
            metrics.observe(engine, counted([[1]]), drafts=5, speedup=1.1)
            watched.note_step(engine)
        for engine in ("0", "1"):
            assert eventually(
                lambda e=engine: not any((gauge, e) in samples(registry) for gauge in GAUGES)
            )
            assert samples(registry)["sequoia:trees_total", engine] == round
        assert samples(registry)["sequoia:expected_speedup", "0"] == 2
        assert eventually(lambda: not watched._has_thread)


def test_busy_engines_keep_their_gauges(quick_watch, monkeypatch):
    """Engine 0 made its last step long ago, engine 1 has just made one."""
    monkeypatch.setattr(prometheus, "_IDLE_SECONDS", 1e9)
    registry, metrics = made([0, 1])
    watched = prometheus.Watch(metrics)
    for engine in (0, 1):
        metrics.observe(engine, counted([[1]]), drafts=5, speedup=1.1)
        watched.note_step(engine)
    with watched._lock:
        watched._stepped[0] -= 2e9
    assert eventually(lambda: not any((gauge, "0") in samples(registry) for gauge in GAUGES))
    assert all((gauge, "1") in samples(registry) for gauge in GAUGES)
    assert samples(registry)["sequoia:trees_total", "1"] == 1  # flushed meanwhile
    with watched._lock:
        watched._stepped.clear()


def test_servers_of_many_processes_show_nan_while_idle(tmp_path):
    """Each writes gauges into a file of its own, from which none can be removed."""
    program = """
import sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sequoia_vllm.metrics.prometheus import PrometheusKinds, TreeMetrics
from sequoia_vllm.tree import TokenTree
metrics = TreeMetrics(TokenTree.chain(2), "a test", "model", [0], PrometheusKinds())
metrics.observe(0, None, drafts=2, speedup=1.1)
collected = CollectorRegistry()
multiprocess.MultiProcessCollector(collected)
for _ in range(2):
    print(generate_latest(collected).decode())
    metrics.rest(0)
"""
    variables = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    labels = '{engine="0",model_name="model"}'
    for gauge, busy in zip(GAUGES, ("2.0", "1.1"), strict=True):
        shown = re.findall(rf"^{re.escape(gauge + labels)} (\S+)$", done.stdout, re.MULTILINE)
        assert shown == [busy, "NaN"]


def test_readers_in_this_process_get_all_that_was_observed():
    _, metrics = made()
    metrics.observe(0, counted([[1]], [[2]]), drafts=5)
    [trees] = [family for family in metrics.collect() if family.name == "sequoia:trees"]
    assert trees.samples[0].value == 2
