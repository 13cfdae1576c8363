"""A worker that is killed ends the engine as it ends plain vLLM, and nothing more is left."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.test_tensor_parallel import CORES
from tests.ray.engines import kill_a_worker
from tests.ray.processes import left_behind

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(CORES < 2, reason="two ranks that wait for each other need two CPU cores"),
]

ENGINE_DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "


def test_killed_worker_amid_a_generation(ray_cluster, tmp_path):
    """Plain vLLM leaves files in shared memory itself, so the comparison is by their kinds."""
    plain, sequoia = (
        ray_cluster.call(kill_a_worker, tmp_path, tree=tree, timeout=500)
        for tree in (None, {"size": 16, "depth": 4})
    )
    (_, plain_files), (running, files) = left_behind(plain), left_behind(sequoia)
    assert 16 <= sequoia["produced"] < 480  # it was amid one, indeed
    assert sequoia["error"].startswith(ENGINE_DEAD)
    assert sequoia["error"] == plain["error"]
    assert running == []
    assert kinds(sequoia["shared_memory"]) == kinds(plain["shared_memory"])
    assert kinds(files) <= kinds(plain_files)


def kinds(files: list[str]) -> Counter[str]:
    """How many files there are of each name, without ports and random parts."""
    varying = re.compile(r"(?<=^psm_)\w+|(?<=^vllm_dist_)\w+|^\d+")
    return Counter(varying.sub("*", Path(file).name) for file in files)
