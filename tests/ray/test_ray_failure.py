"""A worker that is killed ends the engine as it ends plain vLLM, and nothing more is left."""

import re
from pathlib import Path

import pytest

from tests.ray.engines import kill_a_worker
from tests.ray.processes import left_behind
from tests.support.cores import needs_two_cores

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    needs_two_cores,
]

# What plain vLLM's caller gets, and its files that are left in shared memory, of Ray's ranks.
PLAIN_LEAVES = re.compile(r"psm_\w+|\d+-tp:.+-cpushm_\d+")
ENGINE_DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "


def test_killed_worker_amid_a_generation(ray_cluster, tmp_path):
    found = ray_cluster.call(kill_a_worker, tmp_path, tree={"size": 16, "depth": 4}, timeout=500)
    running, files = left_behind(found)
    assert 16 <= found["produced"] < 480  # it was amid one, indeed
    assert found["error"].startswith(ENGINE_DEAD)
    assert running == []
    assert all(PLAIN_LEAVES.fullmatch(Path(file).name) for file in files), files
