"""``vllm serve --nnodes 2`` without Ray: each node is started by a command of its own."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from vllm import SamplingParams

from tests.support.cores import needs_two_cores
from tests.support.engines import running, sequoia, tokens_of
from tests.support.models import prompts
from tests.support.serving import START_DEADLINE, Server, free_port, wait_for_end

pytestmark = [pytest.mark.engine, needs_two_cores, pytest.mark.nightly]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))


@contextmanager
def two_nodes(folder: Path, *configs: dict) -> Iterator[list[Server]]:
    """Two nodes on this machine, with one rank and one configuration each."""
    port, nodes = free_port(), []
    try:
        for rank, config in enumerate(configs):
            options = [
                "--tensor-parallel-size=2", "--distributed-executor-backend=mp", "--nnodes=2",
                f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}",
                f"--speculative-config={json.dumps(config)}",
            ]  # fmt: skip
            log = folder / f"node-{rank}.log"
            nodes.append(Server(log, *options, *["--headless"] * (rank > 0), forks=True))
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def test_two_nodes_answer_as_plain_vllm(tmp_path):
    text, params = prompts(1)[0], SamplingParams(temperature=0, max_tokens=48)
    with running() as llm:
        [expected] = tokens_of(llm.generate([text], params, use_tqdm=False))
    with two_nodes(tmp_path, sequoia(), sequoia()) as (first, second):
        first.wait_until_healthy()
        answer = first.complete(
            prompt=text, temperature=0, max_tokens=48, extra_body={"return_token_ids": True}
        )
        [trees] = first.metric("sequoia:trees_total")
        family = second.process.children(recursive=True)
        for node in (first, second):
            node.process.send_signal(signal.SIGINT)
        assert wait_for_end([first.process, second.process, *family], START_DEADLINE) == []
    assert answer.choices[0].token_ids == expected
    assert trees > 0


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
