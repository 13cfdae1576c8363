"""What vLLM's log and metrics say of our engines; no engine is started."""

import inspect
import logging
import pickle
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

from sequoia_vllm.engine.common.draft_schedule import MISLEADING
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core.scheduling import TreeScheduling
from tests.support.engines import configured, sequoia
from tests.support.models import DRAFT

CHAIN = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 5}


def test_the_log_names_the_method_that_was_asked_for():
    trees = pickle.loads(pickle.dumps(configured(sequoia(12, 4)).speculative_config))
    assert (
        repr(trees) == f"SpeculativeConfig(method='sequoia', model={DRAFT!r}, num_spec_tokens=11)"
    )
    assert "method='draft_model'" in repr(configured(CHAIN).speculative_config)


@pytest.mark.parametrize(("asked", "levels"), [(sequoia(12, 4), 4), (CHAIN, 5)])
def test_accepted_positions_are_the_levels_of_a_tree(monkeypatch, asked, levels):
    """In vLLM's metrics, and in its line of the log."""
    config = configured(asked)
    registry = CollectorRegistry()
    monkeypatch.setattr(SpecDecodingProm, "_counter_cls", partial(Counter, registry=registry))
    shown = SpecDecodingProm(config.speculative_config, ["engine"], {0: ["0"]})
    stats = SpecDecodingStats.new(config.speculative_config.num_speculative_tokens)
    stats.observe_draft(num_draft_tokens=stats.num_spec_tokens, num_accepted_tokens=3)
    ours = SequoiaSettings.enabled(config)
    scheduler = object.__new__(TreeScheduling if ours else Scheduler)
    scheduler.log_stats = False
    if ours:
        scheduler.tree = SequoiaSettings.of(config).tree
    assert scheduler.make_stats(stats) is None
    shown.observe(stats)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    values = [registry.get_sample_value(name, {"engine": "0", "position": str(position)})
              for position in range(levels + 1)]  # fmt: skip
    assert values == [1, 1, 1, *[0] * (levels - 3), None]
    lines = SpecDecodingLogging()
    lines.observe(stats)
    logged = []
    lines.log(lambda text, *values: logged.append(text % values))
    rates = ", ".join(["1.000"] * 3 + ["0.000"] * (levels - 3))
    assert f"Per-position acceptance rate: {rates}, Avg" in logged[0]


def test_advice_that_misleads_with_trees_is_not_logged():
    """vLLM's lines are known by their beginnings, which its source has."""
    source = Path(inspect.getfile(VllmConfig)).read_text(encoding="utf-8")
    assert all(beginning in source for beginning in MISLEADING)
    configured(sequoia(12, 4))
    logger = logging.getLogger("vllm.config.vllm")
    for text, is_shown in (*((f"{line} 9", False) for line in MISLEADING), ("other", True)):
        record = logger.makeRecord(logger.name, logging.WARNING, "f", 1, text, (), None)
        assert bool(logger.filter(record)) is is_shown
