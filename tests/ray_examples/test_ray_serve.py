"""examples/ray_serve.py: two replicas on two nodes answer as plain vLLM, and one can be lost."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from sequoia_vllm.tree import TokenTree
from tests.ray.cluster import wait_for
from tests.ray_examples.cluster import ENGINE, ENGINE_OPTIONS, MAX_TOKENS, PROMPTS, STOP_DEADLINE
from tests.support.models import DRAFT, TARGET
from tests.support.serving import Session, free_port, http_client

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3, 6))
DRAFTS = "ray_vllm_spec_decode_num_drafts_total"
DRAFT_TOKENS = "ray_vllm_spec_decode_num_draft_tokens_total"


class Server:
    def __init__(self, cluster, folder) -> None:
        self.cluster = cluster
        self.url = f"http://127.0.0.1:{free_port()}"
        self._http = http_client(self.url, timeout=120)
        self.tree = folder / "tree.json"
        TREE.save(self.tree)
        self.session: Session = cluster.run(
            folder / "serve.log", "ray_serve.py", f"--model={TARGET}", f"--draft-model={DRAFT}",
            f"--tree={self.tree}", "--served-name=pair", "--device=cpu", "--min-replicas=2",
            "--max-replicas=2", f"--port={self.url.rpartition(':')[2]}",
            "--health-check-period=0.5",
            # Drafts are waited for, and do not pay here.
            '--speculative-options={"adapt": false}',
            f"--engine-options={json.dumps(ENGINE_OPTIONS)}",
        )  # fmt: skip

    def complete(self, prompt: str, **options) -> httpx.Response:
        request = {"model": "pair", "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS}
        return self._http.post("/v1/completions", json={**request, **options})

    def texts(self) -> list[str]:
        """Completions of `PROMPTS`, asked for at once."""
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            responses = list(threads.map(self.complete, PROMPTS))
        return [r.raise_for_status().json()["choices"][0]["text"] for r in responses]

    def engines(self) -> dict[int, int]:
        return {engine.pid: engine.ppid() for engine in self.cluster.named(ENGINE)}

    def serves(self) -> bool:
        self.session.check_running()
        try:
            return self.complete("x", max_tokens=1).status_code == 200
        except httpx.TransportError:
            return False

    def drafts_of_both(self) -> dict[str, float]:
        """Drafts by each replica, once there are two."""
        return drafts if len(drafts := self.by_replica(DRAFTS)) == 2 else {}

    def by_replica(self, name: str) -> dict[str, float]:
        return {s.labels["ReplicaId"]: s.value for s in self.cluster.samples(name) if s.value}


@pytest.fixture(scope="module")
def server(cluster, tmp_path_factory) -> Iterator[Server]:
    server = Server(cluster, tmp_path_factory.mktemp("serve"))
    try:
        wait_for(
            lambda: cluster.named("ray::ServeReplica") or server.session.check_running(),
            what="the start of a replica",
        )
        server.tree.unlink()  # it need not exist where replicas run: their start takes longer
        wait_for(server.serves, what="the start of the application")
        yield server
    finally:
        server.session.kill()


def test_both_replicas_answer_with_trees_as_plain_vllm_without(server, plain_texts):
    # Serve answers as soon as one replica is there: what is asked for meanwhile is little.
    before = wait_for(
        lambda: server.complete("x", max_tokens=8) and server.drafts_of_both(),
        what="a draft by each replica",
        pause=0.5,
    )

    def more_drafts_of_both() -> bool:
        assert server.texts() == plain_texts
        return all(now > before[replica] for replica, now in server.drafts_of_both().items())

    wait_for(more_drafts_of_both, what="more drafts by each replica", pause=2)
    assert len(server.engines()) == 2
    # Ours go where vLLM's go.
    wait_for(
        lambda: set(server.by_replica("ray_sequoia_trees_total")) == set(before),
        what="the trees of each replica",
    )

    def trees_are_whole() -> bool:
        """But for a few, trimmed where an answer ends. The two are not read at one time."""
        drafts, tokens = server.by_replica(DRAFTS), server.by_replica(DRAFT_TOKENS)
        shares = [tokens[one] / drafts[one] / TREE.num_speculative_tokens for one in drafts]
        return all(0.8 <= share <= 1 for share in shares)

    wait_for(trees_are_whole, seconds=STOP_DEADLINE, what="drafts of whole trees")


def test_requests_that_vllm_refuses_with_speculation_are_served(server):
    """The replicas' own processes know the plugin, though the engine is configured elsewhere."""
    response = server.complete(PROMPTS[0], temperature=1, min_p=0.1)
    assert response.status_code == 200, response.text


def test_a_replica_whose_engine_is_killed_is_replaced(server, plain_texts):
    before = server.engines()
    victim, *_ = server.cluster.named(ENGINE)
    victim.kill()
    after = wait_for(
        lambda: len(now := server.engines()) == 2 and victim.pid not in now and now,
        what="the start of another engine",
    )
    assert len(set(before) & set(after)) == 1
    assert before[victim.pid] not in after.values()  # the whole replica was replaced

    def all_answer() -> bool:
        try:
            return server.texts() == plain_texts
        except httpx.HTTPStatusError:
            return False

    wait_for(all_answer, what="an answer to all requests")


def test_sigterm_ends_the_application_and_leaves_no_process(server):
    server.session.process.terminate()
    assert server.session.process.wait(STOP_DEADLINE) == 0, server.session.tail
    assert server.session.family() == []
    wait_for(
        lambda: not server.cluster.named("ray::ServeReplica") and not server.engines(),
        seconds=STOP_DEADLINE,
        what="the end of all replicas and engines",
    )
