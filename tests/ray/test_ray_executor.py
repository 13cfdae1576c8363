"""On vLLM's Ray executor the workers draft the driver's tree, and tokens are plain vLLM's."""

import json
import signal

import pytest
from vllm import SamplingParams

from sequoia_vllm.tree import TokenTree
from tests.ray.engines import generate
from tests.ray.processes import footprint, left_behind
from tests.support.cores import needs_two_cores
from tests.support.models import DRAFT, TARGET, prompts
from tests.support.serving import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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


@needs_two_cores
def test_workers_draft_the_drivers_tree_and_tokens_are_those_of_plain_vllm(
    ray_cluster, plain_outputs, tmp_path
):
    """The tree is in a file that is gone, and was in a directory that is not the workers'."""
    texts = prompts(len(PARAMS))
    expected = plain_outputs(texts[:6], [SamplingParams(**settings) for settings in PARAMS[:6]])
    TREE.save(tmp_path / "tree.json")
    found = ray_cluster.call(
        generate, tmp_path, prompts=texts, params=PARAMS, tree="tree.json",
        tensor_parallel_size=2,
    )  # fmt: skip
    running, _ = left_behind(found)
    assert found["tokens"][:6] == expected
    assert found["directories"] == [str(ray_cluster.directory)] * 2  # they are Ray's, indeed
    for counted in found["ranks"]:
        assert counted["tree"] == TREE.to_dict()
        assert counted["tokens"] > 1.2 * counted["tree_steps"] > 0
    counters = ("steps", "tree_steps", "tokens", "depth_counts", "offered", "accepted")
    first, last = found["ranks"][0], found["ranks"][-1]
    assert [first[name] for name in counters] == [last[name] for name in counters]
    assert running == []


@needs_two_cores
def test_server_with_ray_answers_as_plain_vllm_and_ends_cleanly(
    ray_cluster, plain_outputs, monkeypatch, tmp_path
):
    [prompt] = prompts(1)
    [expected] = plain_outputs([prompt], SamplingParams(**GREEDY))
    config = {"method": "sequoia", "model": DRAFT, "tree": {"size": 7, "depth": 3}}
    with monkeypatch.context() as surroundings:
        for name, value in ray_cluster.environment.items():
            surroundings.setenv(name, value)
        server = Server(
            tmp_path / "server.log", "--distributed-executor-backend=ray",
            "--tensor-parallel-size=2", f"--speculative-config={json.dumps(config)}",
            model=TARGET,
        )  # fmt: skip
    try:
        server.wait_until_healthy()
        answer = server.complete(prompt=prompt, **GREEDY, extra_body={"return_token_ids": True})
        trees, tokens = (
            sum(server.metric(f"sequoia:{name}_total")) for name in ("trees", "emitted_tokens")
        )
        workers = ray_cluster.actors()
        family = [*server.process.children(recursive=True), *workers]
        found = footprint([server.process, *workers])
        server.process.send_signal(signal.SIGTERM)
        server.check_clean_end(family)
    finally:
        server.kill()
    running, _ = left_behind(found)
    assert answer.choices[0].token_ids == expected
    assert len(workers) == 2
    assert tokens > 1.2 * trees > 0
    assert running == []
