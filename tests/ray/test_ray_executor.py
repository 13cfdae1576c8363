"""On vLLM's Ray executor the workers draft the driver's tree, and tokens are plain vLLM's.

A worker that is killed ends the engine as it ends plain vLLM, and nothing more is left.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from sequoia_vllm.tree import TokenTree
from tests.ray.cluster import left_behind
from tests.ray.engines import generate_then_kill_a_worker
from tests.support.cores import needs_two_cores
from tests.support.engines import plain_outputs
from tests.support.models import prompts

pytestmark = [
    pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded, pytest.mark.timeout(1200),
    needs_two_cores,
]  # fmt: skip

# Not one that anything would choose by itself: the second child has the longer branch.
#
#   0 ─┬─ 1 ─── 3
#      └─ 2 ─┬─ 4 ─── 6
#            └─ 5
TREE = TokenTree((-1, 0, 0, 1, 2, 2, 4))

GREEDY = {"temperature": 0, "max_tokens": 32}
SEEDED = [{"temperature": 0.8, "top_p": 0.95, "seed": i, "max_tokens": 32} for i in range(3)]
UNSEEDED = {"temperature": 1.0, "max_tokens": 32}  # busy, and not compared
PARAMS = [GREEDY, GREEDY, GREEDY, *SEEDED, UNSEEDED, UNSEEDED]


# What plain vLLM's caller gets when a rank is killed, and its files that are then left in
# shared memory, of Ray's ranks.
PLAIN_LEAVES = re.compile(r"psm_\w+|\d+-tp:.+-cpushm_\d+")
ENGINE_DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "


@pytest.fixture(scope="module")
def found(ray_cluster, tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("ranks")
    TREE.save(directory / "tree.json")
    return ray_cluster.call(
        generate_then_kill_a_worker, directory, timeout=500,
        prompts=prompts(len(PARAMS)), params=PARAMS, tree="tree.json",
    )  # fmt: skip


def test_workers_draft_the_drivers_tree_and_tokens_are_those_of_plain_vllm(ray_cluster, found):
    """The tree is in a file that is gone, and was in a directory that is not the workers'."""
    generated, compared = found["generated"], PARAMS[:6]
    params = [SamplingParams(**settings) for settings in compared]
    assert generated["tokens"][:6] == plain_outputs(prompts(len(compared)), params)
    # They are Ray's, indeed.
    assert generated["directories"] == [str(ray_cluster.directory)] * 2
    for counted in generated["ranks"]:
        assert counted["tree"] == TREE.to_dict()
        assert counted["tokens"] > 1.2 * counted["tree_steps"] > 0
    counters = ("steps", "tree_steps", "tokens", "depth_counts", "offered", "accepted")
    first, last = generated["ranks"]
    assert [first[name] for name in counters] == [last[name] for name in counters]


def test_killed_worker_amid_a_generation(found):
    killed = found["killed"]
    running, files = left_behind(killed)
    assert 16 <= killed["produced"] < 480  # it was amid one, indeed
    assert killed["error"].startswith(ENGINE_DEAD)
    assert running == []
    assert all(PLAIN_LEAVES.fullmatch(Path(file).name) for file in files), files
