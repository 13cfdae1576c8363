"""Engines that draft as much as pays: tokens stay plain vLLM's, and what was learned is kept."""

import json

import numpy as np
import pytest
from vllm import SamplingParams

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.adaptation.step_times import StepTimes
from tests.support.engines import metric, running, sequoia, tokens_of
from tests.support.models import prompts, save_random_draft

pytestmark = pytest.mark.engine

PROMPTS = prompts(4)
GREEDY = SamplingParams(temperature=0, max_tokens=280, ignore_eos=True)


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def test_drafts_that_do_not_pay_end_and_stay_away(plain_outputs, tmp_path, monkeypatch):
    """An untrained draft is never right. By default: nothing is said of adapting."""
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))
    monkeypatch.setattr("sequoia_vllm.engine.core.adapting._SAVE_DECISIONS", 0.0)
    add = StepTimes.add  # whatever else the machine does meanwhile
    monkeypatch.setattr(StepTimes, "add", lambda *step: add(*step[:3], 0.01 + step[1] / 1000))
    config = sequoia(draft=save_random_draft(tmp_path))
    del config["adapt"]
    with running(config) as llm:
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert scheduler_of(llm).dynamic_sd_lookup[4:8] == [0] * 4
        trees = metric(llm, "vllm:spec_decode_num_drafts")
        assert metric(llm, "sequoia:measured_speedup") > 0
    assert found == plain_outputs(PROMPTS, GREEDY)
    assert 4 < trees < 200 * 4
    [path] = (tmp_path / "trees" / "adaptation").glob("*.json")
    assert json.loads(path.read_text())["lookup"][4] == 0
    with running(config) as llm:
        short = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        found = tokens_of(llm.generate(PROMPTS, short, use_tqdm=False))
        assert metric(llm, "vllm:spec_decode_num_drafts") <= 4  # of its first step
        # Measuring tools get as many drafts as are configured, whatever was decided.
        llm.collective_rpc("sequoia_limit_drafts", args=(3,))
        assert tokens_of(llm.generate(PROMPTS, short, use_tqdm=False)) == found
        assert set(scheduler_of(llm).dynamic_sd_lookup[1:]) == {3}
        assert metric(llm, "vllm:spec_decode_num_drafts") > 4 * 15
    assert found == [tokens[:24] for tokens in plain_outputs(PROMPTS, GREEDY)]


@pytest.mark.parametrize("setting", [{"adapt": False}, {"adapt": None}])
def test_frozen_engines_draft_as_configured(tmp_path, setting):
    """Told so, or because they are told how much to draft at which batch size."""
    schedule = {} if setting["adapt"] is False else {"num_speculative_tokens_per_batch_size": 1}
    schedule = {name: [[1, 8, 15]] for name in schedule}
    config = sequoia(draft=save_random_draft(tmp_path), **setting, **schedule)
    with running(config) as llm:
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        assert set(scheduler_of(llm).dynamic_sd_lookup[1:]) == {15}


def test_tokens_do_not_depend_on_decisions(plain_outputs, monkeypatch):
    """Whatever a controller decides, and however often."""
    rng = np.random.default_rng(0)

    def observe(self, step):
        if rng.random() < 0.3:
            self.lookup[:] = [int(rng.choice([0, 1, 3, 7, 15]))] * len(self.lookup)

    monkeypatch.setattr(DraftController, "observe", observe)
    with running(sequoia(adapt=True), max_num_seqs=3) as llm:
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 100
    assert found == plain_outputs(PROMPTS, GREEDY)
