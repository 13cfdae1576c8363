"""The GPU engine times replayed graphs in its first warm-up, and leaves no trace of it."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.hardware.step_profile import Profile
from tests.support.generating import random_prompts, save_related_pair
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import (
    counting_eager_growth,
    generate,
    generate_with_trees,
    rehearsing,
    since,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def start_twice(folder: str) -> dict[str, Any]:
    """A pair that nobody tuned, with trees of 8 nodes at most."""
    from gpu_stand_in import graphs
    from vllm import SamplingParams

    from sequoia_vllm.engine.worker.start import timing

    timing.SECONDS, timing._MOST_SPREAD = 60.0, math.inf  # whatever else the machine does
    timing._LEAST_SHARE = 0.0
    os.environ["SEQUOIA_VLLM_TREES"] = folder
    target, draft = save_related_pair(Path(folder))
    requests = random_prompts([9, 18, 13])
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    options = {"model": target, "max_model_len": 512}
    with rehearsing(None, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, requests, params)}
    config = {"method": "sequoia", "model": draft, "num_speculative_tokens": 7}
    ordinary, replayed = timing.time_at_start, {}

    def time_at_start(worker: Any) -> None:
        before = graphs.report()
        with counting_eager_growth() as eager:
            ordinary(worker)
        replayed.update({**since(before)["replayed"], "eager growth": len(eager)})

    from sequoia_vllm.engine.worker import worker_base

    worker_base.time_at_start = time_at_start
    with rehearsing(config, **options) as llm:
        [stats] = llm.collective_rpc("sequoia_stats")
        answers["before"] = [stats["steps"], stats["tree_steps"]]
        answers["replayed"] = dict(replayed)
        answers["trees"] = generate_with_trees(llm, requests, params)
    [path] = Path(folder).glob("timed_at_start/*.json")
    answers["profile"] = path.read_text()
    worker_base.time_at_start = ordinary
    with rehearsing(config, **options) as llm:
        answers["source"] = SequoiaSettings.of(llm.llm_engine.vllm_config).tree_source
        answers["again"] = generate_with_trees(llm, requests, params)
    return answers


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("rehearsal")
    return call_on_gpu(start_twice, directory, folder=str(directory))


def test_graphs_are_timed(started, tmp_path):
    """Of each kind of step with trees; where requests begin, the draft reads all they have."""
    path = tmp_path / "profile.json"
    path.write_text(started["profile"])
    profile = Profile.load(path)
    assert profile.target_forward[0].tokens == [1, 2, 4, 8, 16]
    assert started["replayed"]["TreeGraphManager"] >= 4 * 3
    assert started["replayed"]["DraftGraphs"] >= 4 * 3
    assert started["replayed"]["eager growth"] == 0


def test_the_second_start_goes_by_it(started):
    assert "timed when this pair started here" in started["source"]


def test_nothing_is_left_of_it(started):
    assert started["before"] == [0, 0]
    for name in ("trees", "again"):
        assert started[name]["tokens"] == started["plain"]["tokens"]
    assert started["trees"]["counts"]["tree_steps"] > 0
