"""Counting trees, carrying the counts, and showing them as metrics and as a log line."""

import os
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sequoia_vllm.metrics import prometheus
from sequoia_vllm.metrics.counts import StepStats, TreeCounts, interval_line, paths_of
from sequoia_vllm.metrics.prometheus import PrometheusKinds, Reason, TreeMetrics
from sequoia_vllm.tree import TokenTree
from tests.support.commands import python
from tests.support.ending import wait_until
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
    stats.observe(paths_of(stats.tree, nodes, np.array(sizes)))


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
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    shown = page.partition("\nSequoia: engine 000: ")[2].partition("\n```")[0]
    pattern = ".+".join(re.escape(part) for part in " ".join(shown.split()).split("..."))
    assert re.fullmatch(pattern, interval_line(TREE, counts, (7, 3), speedup=1.309))


def test_interval_line_of_a_trimmed_tree_and_of_none():
    stats = StepStats(TREE)
    observe(stats, [[2]], [3])
    for drafts, shown in (
        ((2, 3), "2 drafts with 3 requests"),
        ((0, 1), "no drafts with 1 request"),
        ((1, 1), "1 draft with 1 request"),
    ):
        assert interval_line(TREE, stats.counts, drafts) == (
            f"up to 7 drafts, depth 3 ({shown}); 2.00 tokens per step; "
            "accepted by depth 1.00; by child 0.00, 1.00"
        )
    assert interval_line(TREE, TreeCounts(TREE), (7, 1)) is None


def test_dynamic_trees_are_counted_by_node():
    """Their nodes' children are not the engine's tree's, also in what crosses processes."""
    stats = StepStats(TREE)
    nodes, sizes = np.array([[2, 5, -1], [1, 2, 6], [-1, -1, -1]]), np.array([8, 7, 3])
    stats.observe(paths_of(TREE, nodes, sizes, np.array([True, True, True])))
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
    alone = StepStats(TREE)
    nodes = np.array([[2, 5], [1, -1], [-1, -1]])
    alone.observe(paths_of(TREE, nodes, np.array([8, 8, 8]), True))
    assert interval_line(TREE, alone.counts, None) == (
        "up to 7 drafts, depth 3; 2.00 tokens per step; accepted by depth 0.67, 0.50, 0.00"
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


def test_of_branches_only_totals_are_counted():
    """One of 30 tokens, of which 20 were accepted, and one without any, beside a tree."""
    stats = StepStats(TREE)
    nodes = np.full((3, 30), -1)
    nodes[:, 0] = 20, 0, 1
    nodes[2, 1] = 3
    stats.observe(paths_of(TREE, nodes, np.array([0, 0, 8]), np.array([True, True, False])))
    alone = counted([[1, 3]])
    assert (stats.counts.trees, stats.counts.tokens) == (3, 3 + 20 + 2)
    assert stats.counts.values[2:].tolist() == alone.values[2:].tolist()
    packed = TreeCounts.from_bytes(TREE, stats.take_paths())
    assert packed.values.tolist() == stats.counts.values.tolist()


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
    # Of engine 0; by child and depth, of nodes that were offered and accepted.
    expected = {
        ("drafted_nodes",): 5, ("trees_total",): 3, ("emitted_tokens_total",): 7,
        **{("accepted_depth_total", depth): 1 for depth in "013"},
        **{("offered_children_total", child, "1"): 3 for child in "123"},
        ("offered_children_total", "1", "2"): 2, ("offered_children_total", "2", "2"): 1,
        ("offered_children_total", "1", "3"): 1,
        **{("accepted_children_total", *place): 1 for place in ("11", "21", "12", "13")},
    }  # fmt: skip
    for _ in range(2):  # nothing is counted twice
        metrics.flush(0)
        changed = {k: v for k, v in samples(registry).items() if start.get(k) != v}
        assert changed == {
            (f"sequoia:{name}", *labels, "0"): value for (name, *labels), value in expected.items()
        }


def test_requests_without_drafts_are_counted_by_reason():
    registry, metrics = made(source="default size; tree a/b: 1 nodes; 3.01 tokens per step")
    metrics.observe(0, None, drafts=7, undrafted=["asked", "structured_outputs", "asked"])
    counted = dict.fromkeys(get_args(Reason), 0) | {"asked": 2, "structured_outputs": 1}
    name, found = "sequoia:undrafted_requests_total", samples(registry)
    assert {reason: found[name, "0", reason] for reason in counted} == counted
    assert found["sequoia:tree_info", "3", "0", "8", "default size"] == 1  # a short label


def test_speedups_are_shown_where_they_are_known():
    """And metrics of a new engine replace the old ones."""
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
    second = TreeMetrics(TREE, "a test", "model", [0], kinds)
    assert expected not in samples(registry)
    for _ in range(2):
        second.unregister()
        assert generate_latest(registry) == b""
    TreeMetrics(TREE, "a test", "model", [0], PrometheusKinds(registry))  # no name is taken


GAUGES = ("sequoia:drafted_nodes", "sequoia:measured_speedup")


def rests(registry, engine: str):
    """Whether gauges of an engine's load are gone, as a function to ask again."""
    return lambda: not any((gauge, engine) in samples(registry) for gauge in GAUGES)


def watched(engines, **options):
    """Metrics of engines, and a watch that is told of their steps: ``step(engine)``."""
    registry, metrics = made(engines, **options)
    watch = prometheus.Watch(metrics)

    def step(engine):
        metrics.observe(engine, counted([[1]]), drafts=5, speedup=1.1)
        watch.note_step(engine)

    return registry, watch, step


@pytest.fixture
def quick_watch(monkeypatch):
    monkeypatch.setattr(prometheus, "_FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(prometheus, "_IDLE_SECONDS", 0.1)


def test_metrics_stay_current_after_the_last_step(quick_watch):
    """No step comes any more, and nobody reads: counters are complete, gauges of a load go."""
    registry, watch, step = watched([0, 1], expected_speedup=2.0)
    for round in (1, 2):  # it goes on after a pause
        for engine in (0, 1):
            step(engine)
        for engine in ("0", "1"):
            wait_until(rests(registry, engine))
            assert samples(registry)["sequoia:trees_total", engine] == round
        assert samples(registry)["sequoia:expected_speedup", "0"] == 2
        wait_until(lambda: not watch._has_thread)


def test_busy_engines_keep_their_gauges(quick_watch, monkeypatch):
    """Engine 0 made its last step long ago, engine 1 has just made one."""
    monkeypatch.setattr(prometheus, "_IDLE_SECONDS", 1e9)
    registry, watch, step = watched([0, 1])
    for engine in (0, 1):
        step(engine)
    with watch._lock:
        watch._stepped[0] -= 2e9
    wait_until(rests(registry, "0"))
    assert all((gauge, "1") in samples(registry) for gauge in GAUGES)
    assert samples(registry)["sequoia:trees_total", "1"] == 1  # flushed meanwhile
    with watch._lock:
        watch._stepped.clear()


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
    done = python(program, "-W", "error", env=variables)
    labels = '{engine="0",model_name="model"}'
    for gauge, busy in zip(GAUGES, ("2.0", "1.1"), strict=True):
        shown = re.findall(rf"^{re.escape(gauge + labels)} (\S+)$", done.stdout, re.MULTILINE)
        assert shown == [busy, "NaN"]


def test_readers_in_this_process_get_all_that_was_observed():
    _, metrics = made()
    metrics.observe(0, counted([[1]], [[2]]), drafts=5)
    [trees] = [family for family in metrics.collect() if family.name == "sequoia:trees"]
    assert trees.samples[0].value == 2
