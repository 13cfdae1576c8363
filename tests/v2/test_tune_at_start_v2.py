"""On Model Runner V2, too, steps are timed in the first warm-up, for the next start's tree."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.hardware.step_profile import Profile
from tests.support.engines import metric, running, tokens_of
from tests.support.generating import TINY, random_prompts, save_related_pair
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def start_twice(folder: str) -> dict[str, Any]:
    """An engine that nobody tuned, with and without asynchronous scheduling, and plain tokens."""
    from vllm import SamplingParams

    from sequoia_vllm.engine.worker.start import timing

    timing.SECONDS, timing._MOST_SPREAD = 30.0, math.inf  # whatever else the machine does
    timing._LEAST_SHARE = 0.0
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    target, draft = save_related_pair(Path(folder))
    requests, options = random_prompts([9, 18, 13]), {"model": target, **TINY}
    with running(None, **options) as llm:
        answers: dict[str, Any] = {
            "plain": tokens_of(llm.generate(requests, params, use_tqdm=False))
        }
    for name, is_ahead in (("ahead", True), ("behind", False)):
        trees = Path(folder) / name
        os.environ["SEQUOIA_VLLM_TREES"] = str(trees)
        config = {"method": "sequoia", "model": draft, "adapt": False}
        with running(config, async_scheduling=is_ahead, **options) as llm:
            before = metric(llm, "vllm:spec_decode_num_drafts")
            [stats] = llm.collective_rpc("sequoia_stats")
            found = tokens_of(llm.generate(requests, params, use_tqdm=False))
            after = metric(llm, "vllm:spec_decode_num_drafts")
            [counted] = llm.collective_rpc("sequoia_stats")
        [path] = (trees / "timed_at_start").glob("*.json")
        with running(config, async_scheduling=is_ahead, **options) as llm:
            source = SequoiaSettings.of(llm.llm_engine.vllm_config).tree_source
        answers[name] = {
            "profile": path.read_text(),
            "tokens": found,
            "before": [before, stats["steps"], stats["tree_steps"]],
            "after": [after, counted["tree_steps"]],
            "source": source,
            "files": len(list((trees / "timed_at_start").iterdir())),
        }
    return answers


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("start")
    return call_on_v2(start_twice, directory, folder=str(directory))


@pytest.mark.parametrize("name", ["ahead", "behind"])
def test_what_is_timed_serves_the_next_start(started, tmp_path, name):
    found = started[name]
    path = tmp_path / "profile.json"
    path.write_text(found["profile"])
    profile = Profile.load(path)
    [target] = profile.target_forward
    assert target.tokens[:2] == [1, 16]
    assert target.seconds == sorted(target.seconds)
    assert min(profile.draft_level[0].seconds) > 1e-5
    assert "timed when this pair started here" in found["source"]
    assert found["files"] == 1


@pytest.mark.parametrize("name", ["ahead", "behind"])
def test_nothing_of_it_is_left_in_the_engine(started, name):
    found = started[name]
    assert found["tokens"] == started["plain"]
    assert found["before"] == [0, 0, 0]
    trees, counted = found["after"]
    # vLLM leaves out what it had scheduled before it saw that a request was at its end.
    late = len(started["plain"]) if name == "ahead" else 0
    assert 0 <= counted - trees <= late < trees
