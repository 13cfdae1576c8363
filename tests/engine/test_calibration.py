"""The measuring tools on live engines: what they write is what the engine did."""

import os

import pytest

from sequoia_vllm.calibration.acceptance import AcceptanceSettings, measure_acceptance
from sequoia_vllm.calibration.profile import ProfileSettings, measure_profile
from sequoia_vllm.hardware.cost import CostModel
from tests.engine.models import DRAFT, MODELS, TARGET

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

pytestmark = pytest.mark.engine

PROMPTS = MODELS / "prompts.jsonl"
QUICK = {"dtype": "float32", "enforce_eager": True, "kv_cache_gib": 0.0625}


@pytest.fixture(autouse=True)
def _fresh_process_groups():
    from vllm.distributed import cleanup_dist_env_and_memory

    yield
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_of_the_embedded_pair(temperature):
    settings = AcceptanceSettings(
        TARGET, DRAFT, PROMPTS, num_prompts=16, max_tokens=32, temperature=temperature,
        branch=8, **QUICK,
    )  # fmt: skip
    found = measure_acceptance(settings, "embedded")
    assert len(found.acceptance) == 8
    assert found.trials[0] > 150
    assert found.low[0] < found.acceptance[0] < found.high[0]
    assert found.low[0] < 0.57 < found.high[0]  # 0.57 greedy, 0.56 at temperature 1
    counts = found.provenance["counts"]
    assert sum(counts["accepted"][0]) == counts["tokens"] - counts["tree_steps"]


def test_profile_of_the_embedded_pair():
    progress = []
    settings = ProfileSettings(
        TARGET, DRAFT, PROMPTS, batch_sizes=(2, 1), tokens=(2, 4), context=64, max_tokens=16,
        rounds=2, **QUICK,
    )  # fmt: skip
    found = measure_profile(settings, lambda *report: progress.append(report))
    assert [curve.batch_size for curve in found.target_forward] == [1, 2]
    assert [curve.tokens for curve in found.target_forward] == [[1, 2, 4]] * 2
    assert [curve.tokens for curve in found.draft_level] == [[1]] * 2
    assert found.dtype == "float32"
    assert (found.target_parameters, found.draft_parameters) == (4_163_840, 1_672_128)
    assert progress[-1][1:] == (11, 12)
    for batch in (1, 2):
        steps = found.provenance["step_seconds"][str(batch)]
        forwards = found.provenance["forward_seconds"][str(batch)]
        assert all(0 < forwards[size] < steps[size] for size in steps)
        assert CostModel(found).plain_seconds(batch) == pytest.approx(steps["1"], abs=1e-6)
