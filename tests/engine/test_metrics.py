"""From the worker's counts to vLLM's metrics and log: the messages, and the real `LLM`."""

import inspect
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.gpu_worker import Worker

from sequoia_vllm import plugin
from sequoia_vllm.engine.common.draft_schedule import MISLEADING
from sequoia_vllm.engine.common.step_messages import (
    REPORT,
    StepOutcome,
    StepReport,
    attach_outcome,
    outcome_of,
)
from sequoia_vllm.engine.core.scheduling import TreeScheduling
from sequoia_vllm.engine.frontend import tree_metrics as shown_metrics
from sequoia_vllm.engine.v2.path_copies import PathCopies
from sequoia_vllm.engine.v2.runner import TreeRunner
from sequoia_vllm.engine.worker.worker_base import SequoiaWorker
from sequoia_vllm.metrics.counts import StepStats, paths_of
from sequoia_vllm.metrics.prometheus import PrometheusKinds, TreeMetrics
from sequoia_vllm.tree import TokenTree
from tests.support.ending import wait_until
from tests.support.engines import configured, metric, running, sequoia, tree_metrics
from tests.support.models import DRAFT, prompts

TREE = TokenTree((-1, 0, 0, 1))


@pytest.fixture
def log(caplog, monkeypatch) -> pytest.LogCaptureFixture:
    """What goes into the log: by another logger, as each engine configures vLLM's anew."""
    monkeypatch.setattr(shown_metrics, "logger", logging.getLogger("trees"))
    caplog.set_level(logging.INFO, "trees")
    return caplog


def one_step(trees: int = 1, tree: TokenTree = TREE) -> bytes:
    """Trees of which node 1 was accepted, then none."""
    return paths_of(tree, np.full((trees, 1), 1), np.full(trees, tree.size)).tobytes()


@pytest.fixture(autouse=True)
def registered():
    plugin.register()


def test_report_crosses_processes_in_vllms_message():
    """What vLLM's encoder and decoder leave of it, after vLLM's own statistics or alone."""
    decoder = MsgpackDecoder(EngineCoreOutputs)
    reports = (
        StepReport(15, one_step(), ["asked", "asked"], tree=TREE.checksum),
        StepReport(None, b""),
        None,
    )
    for report in reports:
        stats = SchedulerStats(num_running_reqs=3)
        setattr(stats, REPORT, report)
        sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
        received = decoder.decode(sent).scheduler_stats
        assert received.num_running_reqs == 3
        assert getattr(received, REPORT) == report


def test_vllms_shared_empty_output_is_left_alone():
    empty = EMPTY_MODEL_RUNNER_OUTPUT
    assert attach_outcome(empty, StepOutcome(limit=0, has_failed=True)) is empty
    assert not any(name.startswith("sequoia") for name in vars(EMPTY_MODEL_RUNNER_OUTPUT))


class Front:
    def __init__(self, logs: bool = True, aggregate: bool = False) -> None:
        self.registry = CollectorRegistry()
        metrics = TreeMetrics(TREE, "a test", "model", [0, 1], PrometheusKinds(self.registry))
        self.logger = shown_metrics.TreeStatLogger(TREE, [0, 1], metrics, logs, aggregate)

    def record(
        self, engine: int, trees: int, running: int = 1, drafts: int | None = 3,
        tree: TokenTree = TREE, speedup: float | None = None, has_failed: bool = False,
    ) -> None:  # fmt: skip
        stats = SchedulerStats(num_running_reqs=running)
        paths = one_step(trees, tree) if trees else b""
        report = StepReport(
            drafts, paths, speedup=speedup, tree=tree.checksum, has_failed=has_failed, requests=5
        )
        setattr(stats, REPORT, report)
        self.logger.record(stats, None, engine_idx=engine)

    def shown(self, engine: int, name: str = "trees") -> float | None:
        labels = {"model_name": "model", "engine": str(engine)}
        return self.registry.get_sample_value(f"sequoia:{name}_total", labels)


def test_metrics_are_exact_when_idle_and_current_without_another_step():
    front = Front()
    for running_requests, shown in ((1, 0), (0, 2)):
        front.record(0, trees=1, running=running_requests)
        assert front.shown(0) == shown
    front.record(0, trees=1)
    front.record(1, trees=3)
    wait_until(lambda: (front.shown(0), front.shown(1)) == (3, 3))


def test_a_front_end_is_told_what_is_new_and_once_a_second_that_the_engine_runs():
    """A report takes both processes longer than a small target's step has to spare."""
    scheduler = SimpleNamespace(running=["a"], _reported=None, _report_again=0.0)

    def is_told(now: float, drafts: int = 3, **report: object) -> bool:
        return bool(TreeScheduling._is_news(scheduler, StepReport(drafts, **report), now))

    assert [is_told(now, paths=b"") for now in (5.0, 5.5)] == [True, False]
    assert is_told(5.6, paths=b"", drafts=0)
    assert is_told(5.7, paths=b"", drafts=0, speedup=0.9)
    assert [is_told(5.8, paths=b"tree") for _ in range(2)] == [True, True]
    assert [is_told(5.9, paths=b"", undrafted=["asked"]) for _ in range(2)] == [True, True]
    assert [is_told(now, paths=b"") for now in (6.0, 6.9, 7.1)] == [True, False, True]
    scheduler.running = []
    assert is_told(7.2, paths=b"")


def scheduler_with(alive: str) -> SimpleNamespace:
    """A scheduler that knows requests a to c, of which only these have not ended."""
    requests = {
        name: SimpleNamespace(is_finished=lambda name=name: name not in alive) for name in "abc"
    }
    return SimpleNamespace(tree=TREE, requests=requests)


def test_trees_of_requests_that_were_aborted_meanwhile_are_not_counted():
    """As vLLM counts: what it would have emitted goes to nobody."""
    steps = [paths_of(TREE, np.full((1, 1), n), np.array([4])).tobytes() for n in (1, 2, 3)]
    scheduled = SimpleNamespace(
        # c only reads its prompt, d has drafts, and the order is not the batch's.
        scheduled_spec_decode_tokens={"d": [5], "b": [6], "c": [], "a": [7]}
    )
    output = SimpleNamespace(req_ids=["a", "b", "c", "d"])
    for alive, expected in (("abc", (0, 1)), ("bc", (1,)), ("c", ())):
        scheduler = scheduler_with(alive)
        kept = TreeScheduling._without_ended(scheduler, scheduled, output, b"".join(steps))
        assert kept == b"".join(steps[i] for i in expected)
    late = steps[0]  # of a step before
    assert TreeScheduling._without_ended(scheduler_with("c"), scheduled, output, late) == late


def test_steps_without_a_report_and_engines_that_joined_later_are_passed_over():
    front = Front()
    front.logger.record(None, None)
    front.logger.record(SchedulerStats(), None)
    front.record(7, trees=1)
    assert front.shown(0) == 0


@pytest.mark.parametrize(
    "other", [TokenTree.chain(5), TokenTree((-1, 0, 0, 2)), TokenTree((-1, 0))]
)
def test_trees_of_a_node_with_another_tree_are_not_counted(log, other):
    """An error would end all requests; paths of another tree of this depth would be counted."""
    front = Front()
    for _ in range(2):
        front.record(1, trees=1, tree=other)
        front.record(0, trees=1)
    front.logger.log()
    assert (front.shown(0), front.shown(1)) == (2, 0)
    warning, line = log.messages
    assert warning.startswith("Sequoia: engine 1 drafts another tree than the one configured here")
    assert line.startswith("Sequoia: engine 000: up to 3 drafts")


def test_each_engine_has_its_line_per_interval(log):
    front = Front()
    front.record(1, trees=2, drafts=1)
    front.record(1, trees=2, drafts=1)
    front.logger.log()
    front.logger.log()  # nothing since
    front.record(0, trees=0)
    front.logger.log()
    assert log.messages == [
        "Sequoia: engine 001: up to 3 drafts, depth 2 (1 draft with 5 requests); 2.00 tokens per "
        "step; accepted by depth 1.00, 0.00; by child 0.50, 0.00"
    ]
    assert front.shown(1) == 4


def test_a_draft_that_failed_is_counted_once_and_named_in_every_interval(log):
    front = Front()
    for _ in range(2):
        front.record(1, trees=0, drafts=0, has_failed=True)
        front.record(0, trees=0)
        front.logger.log()
    assert (front.shown(0, "draft_failures"), front.shown(1, "draft_failures")) == (0, 1)
    assert log.messages == ["Sequoia: engine 001: no drafts since the draft model failed"] * 2


def test_drafts_that_are_hardly_ever_accepted_are_named_once(log):
    """By engine, from enough trees on, and again when they had been accepted meanwhile."""

    def in_an_interval(share: float, trees: int) -> list[str]:
        tokens = trees + round(share * trees)
        accepted = np.full((trees, 1), -1)
        accepted[: tokens - trees] = 1
        paths = paths_of(TREE, accepted, np.full(trees, TREE.size)).tobytes()
        stats = SchedulerStats(num_running_reqs=1)
        setattr(stats, REPORT, StepReport(3, paths, tree=TREE.checksum, requests=1))
        front.logger.record(stats, None, engine_idx=1)
        log.clear()
        front.logger.log()
        return [line.levelname for line in log.records]

    front = Front()
    assert in_an_interval(0.05, 20) == ["INFO"]
    assert in_an_interval(0.05, 20) == ["INFO", "WARNING"]
    assert "engine 001: hardly any draft is accepted (1.05 tokens per step)" in log.text
    assert in_an_interval(0.05, 100) == ["INFO"]
    assert in_an_interval(0.5, 100) == ["INFO"]
    assert "WARNING" in in_an_interval(0.05, 40)


def test_line_of_all_engines(log):
    front = Front(aggregate=True)
    front.record(0, trees=1, speedup=1.2)
    front.record(1, trees=1, speedup=1.4)
    front.logger.log()
    [line] = log.messages
    assert line.endswith("; 1.30x plain")
    assert line.startswith(
        "Sequoia: 2 engines: up to 3 drafts, depth 2 (3 drafts with 5 requests); 2.00"
    )


def test_no_line_where_vllm_writes_none(log):
    front = Front(logs=False)
    front.record(0, trees=1)
    front.logger.log()
    assert log.messages == []


def abort_all(llm, texts) -> None:
    """Ends requests amid their answers, some while a step runs; the engine makes no other step."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=40)
    for index, text in enumerate(texts):
        engine.add_request(str(index), text, params)
    for _ in range(4):
        engine.step()
    core = engine.engine_core.engine_core
    ids = list(core.scheduler.requests)
    assert len(ids) == len(texts)
    core.aborts_queue.put_nowait(ids[:2])
    engine.step()
    assert list(core.scheduler.requests) == ids[2:]
    engine.abort_request([str(index) for index in range(len(texts))])
    assert not core.scheduler.requests


class LateEvent:
    """A copy that arrives only when it is waited for."""

    has_come = False

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.has_come = True


def test_the_last_trees_come_with_the_step_without_requests(monkeypatch):
    """On GPUs copies arrive late: without it they would wait for the next request."""
    runner = object.__new__(TreeRunner)
    runner.stats, runner._paths = StepStats(TREE), PathCopies(TREE, torch.device("cpu"))
    # One request had a tree; the other read its prompt.
    paths = torch.tensor([[4, 1, -1], [1, -1, -1]], dtype=torch.int32)
    runner._paths._under_way.append((paths, LateEvent(), False))
    runner._observe_arrived()
    assert runner.stats.take_paths() == b""

    monkeypatch.setattr(Worker, "execute_model", lambda self, step: EMPTY_MODEL_RUNNER_OUTPUT)
    worker = object.__new__(SequoiaWorker)
    worker.model_runner, worker.use_v2_model_runner = runner, True
    nothing = SimpleNamespace(
        total_num_scheduled_tokens=0, has_structured_output_requests=False,
        scheduled_spec_decode_tokens={},
    )  # fmt: skip
    output = worker.execute_model(nothing)
    brought = outcome_of(output).paths
    assert brought == one_step()
    assert TreeScheduling._without_ended(scheduler_with("a"), nothing, output, brought) == brought
    worker.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    assert worker.execute_model(nothing) is EMPTY_MODEL_RUNNER_OUTPUT


@pytest.mark.engine
def test_llm_shows_what_the_worker_counted(log):
    schedule = [[1, 3, 15], [4, 8, 3]]
    config = sequoia(num_speculative_tokens_per_batch_size=schedule)
    with running(config, per_request_spec_decode_metrics="detailed") as llm:
        texts = prompts(4)
        params = [SamplingParams(temperature=t, max_tokens=40) for t in (0, 0, 1.0, 0.7)]
        answers = llm.generate(texts, params, use_tqdm=False)
        # The same four times: all end in one step, so none has fewer.
        llm.generate(texts[:1] * 4, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert tree_metrics(llm)["drafted_nodes"] == 3
        llm.generate(texts[:1], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        found = tree_metrics(llm)
        [worker] = llm.collective_rpc("sequoia_stats")
        vllms = {
            name: metric(llm, f"vllm:spec_decode_num_{name}")
            for name in ("drafts", "accepted_tokens")
        }
        llm.llm_engine.do_log_stats()
        [info] = [m for m in llm.get_metrics() if m.name == "sequoia:tree_info"]
        abort_all(llm, texts)
        assert tree_metrics(llm)["trees"] == metric(llm, "vllm:spec_decode_num_drafts")
        assert tree_metrics(llm)["trees"] > found["trees"]

    for answer in answers:
        of_request = answer.outputs[0].spec_decode_metrics.to_dict()
        accepted = of_request["per_step_accepted"]
        by_depth = [accepted.count(depth) for depth in range(5)]
        assert of_request["acceptance_histogram"] == by_depth
        assert of_request["mean_acceptance_length"] == pytest.approx(1 + np.mean(accepted))
        assert of_request["num_draft_tokens"] >= 3 * len(accepted) > 0
    assert found["drafted_nodes"] == 15
    assert found["trees"] == worker["tree_steps"] == vllms["drafts"] > 20
    assert found["emitted_tokens"] == worker["tokens"]
    assert found["emitted_tokens"] - found["trees"] == vllms["accepted_tokens"] > 20
    depths = [found[f"accepted_depth/{depth}"] for depth in range(5)]
    assert depths == worker["depth_counts"]
    for name in ("offered", "accepted"):
        shown = [
            [found.get(f"{name}_children/{depth}/{child}", 0) for child, _ in enumerate(row, 1)]
            for depth, row in enumerate(worker[name], 1)
        ]
        assert shown == worker[name]
    assert (info.labels["size"], info.labels["depth"], info.value) == ("16", "4", 1)
    assert info.labels["engine"] == "0"
    assert info.labels["source"] == "optimal for the given size"
    [line] = [line for line in log.messages if "tokens per step" in line]
    tokens_per_step = found["emitted_tokens"] / found["trees"]
    assert line.startswith("Sequoia: engine 000: up to 15 drafts, depth 4 (15 drafts with ")
    assert f"); {tokens_per_step:.2f} tokens per step; " in line

    with running(None) as llm:
        assert tree_metrics(llm) == {}


# -- what vLLM's own log and metrics say of our engines ------------------------------------------


CHAIN = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 5}


def test_the_log_names_the_method_that_was_asked_for():
    trees = pickle.loads(pickle.dumps(configured(sequoia(12, 4)).speculative_config))
    assert (
        repr(trees) == f"SpeculativeConfig(method='sequoia', model={DRAFT!r}, num_spec_tokens=11)"
    )
    assert "method='draft_model'" in repr(configured(CHAIN).speculative_config)


def test_advice_that_misleads_with_trees_is_not_logged():
    """vLLM's lines are known by their beginnings, which its source has."""
    source = Path(inspect.getfile(VllmConfig)).read_text(encoding="utf-8")
    assert all(beginning in source for beginning in MISLEADING)
    configured(sequoia(12, 4))
    logger = logging.getLogger("vllm.config.vllm")
    for text, is_shown in (*((f"{line} 9", False) for line in MISLEADING), ("other", True)):
        record = logger.makeRecord(logger.name, logging.WARNING, "f", 1, text, (), None)
        assert bool(logger.filter(record)) is is_shown
