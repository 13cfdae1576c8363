"""Engines that nobody tuned time steps in their first warm-up; the next start's tree is by that."""

import math

import pytest
from vllm import SamplingParams

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.worker.start import timing
from sequoia_vllm.engine.worker.start.dummy_requests import DummyRequests
from sequoia_vllm.hardware.step_profile import Profile
from tests.support.cores import needs_two_cores
from tests.support.engines import metric, running, tokens_of
from tests.support.models import DRAFT, prompts

pytestmark = pytest.mark.engine

UNTUNED = {"method": "sequoia", "model": DRAFT, "adapt": False}
PROMPTS = prompts(4)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def trees(tmp_path, monkeypatch):
    """The user's directory: empty."""
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))
    # Whatever else the machine does meanwhile.
    monkeypatch.setattr(timing, "SECONDS", 30.0)
    monkeypatch.setattr(timing, "_MOST_SPREAD", math.inf)
    monkeypatch.setattr(timing, "_LEAST_SHARE", 0.0)
    return tmp_path / "trees"


def settings_of(llm) -> SequoiaSettings:
    return SequoiaSettings.of(llm.llm_engine.vllm_config)


def files(trees):
    return sorted((trees / "timed_at_start").glob("*"))


def test_the_second_start_goes_by_what_the_first_timed(plain_outputs, trees):
    with running(UNTUNED) as llm:
        assert settings_of(llm).to_time is not None
        assert metric(llm, "vllm:spec_decode_num_drafts") == 0
        [stats] = llm.collective_rpc("sequoia_stats")
        assert (stats["steps"], stats["tree_steps"], stats["trace"]) == (0, 0, None)
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        [stats] = llm.collective_rpc("sequoia_stats")
        assert stats["tree_steps"] == metric(llm, "vllm:spec_decode_num_drafts") > 0
    assert found == plain_outputs(PROMPTS, GREEDY)
    [path] = files(trees)
    written = path.read_bytes()
    profile = Profile.load(path)
    assert profile.source == "warm-up"
    [target], [draft], [verification] = (
        profile.target_forward, profile.draft_level, profile.verification,
    )  # fmt: skip
    assert target.tokens == [1, 2, 4, 8, 16, 32, 64, 128]
    assert target.seconds == sorted(target.seconds)
    assert draft.tokens[0] == 1
    assert verification.tokens == target.tokens[1:]
    # A step takes no less than its parts, and these tiny models' passes take milliseconds.
    assert 0 < target.seconds[0] < 1
    assert 1e-5 < draft.seconds[0] < 1
    with running(UNTUNED) as llm:
        settings = settings_of(llm)
        assert settings.to_time is None
        assert f"timed when this pair started here ({path})" in settings.tree_source
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert found == plain_outputs(PROMPTS, GREEDY)
    assert [entry.read_bytes() for entry in files(trees)] == [written]


@pytest.mark.parametrize("keys", [{"tune_at_start": False}, {"tree": {"size": 8}}])
def test_nothing_is_timed_that_was_not_asked_for(trees, keys):
    with running({**UNTUNED, **keys}) as llm:
        assert settings_of(llm).to_time is None
    assert files(trees) == []


def test_times_that_cannot_be_kept_end_no_engine(plain_outputs, trees, caplog):
    trees.mkdir()
    (trees / "timed_at_start").write_text("not a directory")
    with running(UNTUNED) as llm:
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert found == plain_outputs(PROMPTS, GREEDY)
    [line] = [line for line in caplog.messages if "steps were not timed" in line]
    assert '"tune_at_start": false' in line


def test_unsteady_times_are_not_kept(trees, monkeypatch):
    monkeypatch.setattr(timing, "_MOST_SPREAD", -1.0)
    with running(UNTUNED):
        assert files(trees) == []


def test_a_step_that_fails_ends_no_engine(plain_outputs, trees, caplog, monkeypatch):
    """In the midst of requests with trees, which are let go."""
    taken = []

    def step(self):
        taken.append(self)
        if len(taken) > 20:
            raise RuntimeError("out of something")
        return ordinary(self)

    ordinary = DummyRequests.step
    monkeypatch.setattr(DummyRequests, "step", step)
    with running(UNTUNED) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        assert not worker.model_runner.requests
        assert "_sample" not in vars(worker.model_runner)  # nothing is recorded any more
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert found == plain_outputs(PROMPTS, GREEDY)
    assert files(trees) == []
    assert any("RuntimeError: out of something" in line for line in caplog.messages)


def test_random_streams_are_those_of_an_engine_that_times_nothing(trees):
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    found = []
    for tunes in (True, False):
        with running({**UNTUNED, "tune_at_start": tunes}) as llm:
            found.append(tokens_of(llm.generate(PROMPTS, params, use_tqdm=False)))
        for path in files(trees):
            path.unlink()
    assert found[0] == found[1]


def test_short_requests_and_a_small_cache_are_no_obstacle(plain_outputs, trees):
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = ["def main():", "import os"]
    with running(UNTUNED, **options) as llm:
        found = tokens_of(llm.generate(texts, short, use_tqdm=False))
    assert found == plain_outputs(texts, short, **options)


@needs_two_cores
def test_ranks_time_the_same_steps(plain_outputs, trees, monkeypatch):
    """Whatever each rank's clock says: here the second has no time for anything."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        # By name, not by import: this process keeps its clocks, and ranks may be spawned.
        "worker_extension_cls": "tests.support.without_clocks.WithoutClocks",
    }
    with running(UNTUNED, **options) as llm:
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        ranks = llm.collective_rpc("sequoia_stats")
    assert found == plain_outputs(PROMPTS, GREEDY)
    assert ranks[0]["tree_steps"] == ranks[1]["tree_steps"] > 0
    [path] = files(trees)
    profile = Profile.load(path)
    assert profile.tensor_parallel_size == 2
    assert len(profile.target_forward[0].tokens) >= 2
