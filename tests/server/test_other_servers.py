"""``vllm serve`` as replicas, as nodes and with weights on a disk.

Tokens are those of plain vLLM each time.
"""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm import SamplingParams

from tests.support.cores import needs_two_cores
from tests.support.engines import plain_outputs, sequoia
from tests.support.models import prompts
from tests.support.serving import (
    DRAFT,
    START_DEADLINE,
    Server,
    environment,
    free_port,
    wait_for_end,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

TEXTS = prompts(8)
GREEDY = {"temperature": 0, "max_tokens": 48}
LONG = {**GREEDY, "extra_body": {"return_token_ids": True}}
NO_DRAFTS = {"vllm_xargs": {"sequoia_max_drafts": 0}}
SHORT = {"temperature": 0, "max_tokens": 1}  # nothing to draft


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))


def plain_tokens(texts: list[str]) -> list[list[int]]:
    return plain_outputs(texts, SamplingParams(**GREEDY))


def trees_of(config: dict[str, Any]) -> str:
    return f"--speculative-config={json.dumps(config)}"


# -- replicas that know nothing of each other's trees ------------------------------------


def test_two_replicas_answer_as_plain_vllm(tmp_path):
    """They adapt, as nothing is said of it, and begin with drafts, as nothing was learned."""
    config = sequoia()
    del config["adapt"]
    with Server(
        tmp_path / "server.log", "--data-parallel-size=2", "--api-server-count=1",
        "--distributed-executor-backend=uni",  # a process less for each
        trees_of(config), forks=True,
    ) as server:  # fmt: skip
        alone = server.complete(prompt=TEXTS[0], **LONG)  # the other replica has nothing to do
        with ThreadPoolExecutor(12) as pool:
            short = [pool.submit(server.complete, prompt=text, **SHORT) for text in TEXTS[:4]]
            long = [pool.submit(server.complete, prompt=text, **LONG) for text in TEXTS]
        found = [future.result().choices[0].token_ids for future in long]
        assert [future.result().usage.completion_tokens for future in short] == [1] * 4
        trees = server.metric("sequoia:trees_total")
        server.stop(signal.SIGINT)
    assert found == plain_tokens(TEXTS)
    assert alone.choices[0].token_ids == found[0]
    assert len(trees) == 2
    assert min(trees) > 0  # both drafted


# -- ``--nnodes 2`` without Ray: each node is started by a command of its own ------------


@contextmanager
def two_nodes(folder: Path, *configs: dict) -> Iterator[list[Server]]:
    """Two nodes on this machine, with one rank and one configuration each."""
    port, nodes = free_port(), []
    with ExitStack() as stack:
        for rank, config in enumerate(configs):
            options = [
                "--tensor-parallel-size=2", "--distributed-executor-backend=mp", "--nnodes=2",
                f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}",
                trees_of(config), *["--headless"] * (rank > 0),
            ]  # fmt: skip
            nodes.append(Server(folder / f"node-{rank}.log", *options, forks=True))
            stack.callback(nodes[-1].kill)
        yield nodes


@needs_two_cores
def test_two_nodes_answer_as_plain_vllm(tmp_path):
    with two_nodes(tmp_path, sequoia(), sequoia()) as (first, second):
        first.wait_until_healthy()
        answer = first.complete(prompt=TEXTS[0], **LONG)
        [trees] = first.metric("sequoia:trees_total")
        family = second.process.children(recursive=True)
        for node in (first, second):
            node.process.send_signal(signal.SIGINT)
        assert wait_for_end([first.process, second.process, *family], START_DEADLINE) == []
    assert [answer.choices[0].token_ids] == plain_tokens(TEXTS)[:1]
    assert trees > 0


@needs_two_cores
def test_nodes_that_choose_unlike_do_not_start(tmp_path):
    config = {key: value for key, value in sequoia().items() if key != "tree"}
    with two_nodes(tmp_path, {**config, "tree": {"parents": [-1]}}, config) as nodes:
        for node in nodes:
            try:
                assert node.process.wait(START_DEADLINE) != 0
            except psutil.TimeoutExpired:
                node.fail("the node neither serves nor ends")
        for node in nodes:
            assert "the commands that started this engine's ranks chose differently" in node.log
            assert "tree: none (rank 0 on" in node.log
            assert "later start will be refused" not in node.log  # there is one directory


# -- weights on a disk, and no option that is not needed ---------------------------------


def test_weights_on_a_disk_by_default(tmp_path, disk):
    """Compiled, for requests as long as the model takes, with a KV cache of what memory is left."""
    config = {"method": "sequoia", "model": DRAFT, "offload": {"directory": str(disk)}}
    options = [
        "--gpu-memory-utilization=0.15",  # the default asks for nine tenths of what others use, too
        "--dtype=float32",  # in bfloat16 the nearest tokens change places
    ]
    log, variables = tmp_path / "log", environment()
    with Server(log, *options, trees_of(config), variables=variables) as server:
        trees, plain = (
            server.complete(prompt=TEXTS[0], **GREEDY, extra_body=body).choices[0].token_ids
            for body in (LONG["extra_body"], {**LONG["extra_body"], **NO_DRAFTS})
        )
        assert [trees] == [plain] == plain_tokens(TEXTS)[:1]
        [accepted] = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert accepted > 5
        assert "GiB of the target's weights (4 layers) are read from" in server.log
        server.stop(signal.SIGTERM)
    assert list(disk.iterdir()) == []
