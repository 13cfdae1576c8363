"""A process of ``vllm serve`` is killed amid a step: clients hear of it, nothing stays, all ends.

Each server begins with what the one that was killed before it left: the next start works.
"""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from vllm import SamplingParams

from tests.support.cores import needs_two_cores
from tests.support.ending import wait_until
from tests.support.engines import plain_outputs, sequoia
from tests.support.models import prompts
from tests.support.serving import Server, wait_for_end

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded, needs_two_cores]

VICTIMS = {"worker": "VLLM::Worker", "core": "VLLM::EngineCore", "API server": ""}
REQUEST = {"prompt": prompts(1)[0], "temperature": 0, "max_tokens": 400}
SECONDS_TO_END = 60.0


def adapting_server(folder: Path, name: str) -> Server:
    """Of two ranks, with adaptation, so that it writes what it learns."""
    config = sequoia()
    del config["adapt"]
    return Server(
        folder / f"{name}.log", "--tensor-parallel-size=2", "--distributed-executor-backend=mp",
        f"--speculative-config={json.dumps(config)}", forks=True,
    )  # fmt: skip


def process_of(server: Server, title: str) -> psutil.Process:
    """The first process with this title; the server itself for none."""
    if not title:
        return server.process
    below = server.process.children(recursive=True)
    return next(one for one in below if title in " ".join(one.cmdline()))


def kill_amid_a_step(server: Server, title: str) -> Exception | None:
    """Kills a process while an answer is streamed; what the client got besides tokens."""
    stream = server.complete(**REQUEST, stream=True)
    for _ in range(4):
        next(stream)
    process_of(server, title).send_signal(signal.SIGKILL)
    try:
        ends = [chunk.choices[0].finish_reason for chunk in stream]
    except (openai.APIError, httpx.HTTPError) as error:
        return error
    assert ends[-1] != "length", "the answer was whole: nothing was killed amid it"
    return None


def test_whoever_is_killed_all_end_and_the_next_start_works(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))
    for name, title in VICTIMS.items():
        with adapting_server(tmp_path, name) as server:
            family = [server.process, *server.process.children(recursive=True)]
            assert len(family) >= 4, "a core and two workers were expected"
            assert kill_amid_a_step(server, title) is not None, f"{name}: the client was not told"
            if name == "API server":
                continue  # plain vLLM's engine cores do not notice its end, either: killed here
            left = wait_for_end(family, SECONDS_TO_END)
            assert left == [], f"{name} was killed, and left behind: {left}; {server.tail}"
            wait_until(lambda server=server: not server.family(), 10, "the end of all processes")
        for file in (tmp_path / "trees").rglob("*.json"):
            json.loads(file.read_text("utf-8"))  # nothing is half written
    with adapting_server(tmp_path, "next") as server:
        short = {**REQUEST, "max_tokens": 48, "extra_body": {"return_token_ids": True}}
        tokens = server.complete(**short).choices[0].token_ids
        [trees] = server.metric("sequoia:trees_total")
    assert [tokens] == plain_outputs(prompts(1), SamplingParams(temperature=0, max_tokens=48))
    assert trees > 0


# -- two API servers before two replicas ---------------------------------------------------------

TEXTS = prompts(8)
SHORT = {"temperature": 0, "max_tokens": 48}


def answered(server: Server) -> tuple[list[Any], int]:
    """Answers to `TEXTS`, and the tokens of three rounds: a connection takes either API server."""
    body, tokens = {"return_token_ids": True}, 0
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        for _ in range(3):
            jobs = [pool.submit(server.complete, prompt=t, **SHORT, extra_body=body) for t in TEXTS]
            answers = [job.result() for job in jobs]
            tokens += sum(one.usage.completion_tokens for one in answers)
    return [one.choices[0].token_ids for one in answers], tokens


def check_sums(server: Server, tokens: int) -> None:
    """What trees brought is what vLLM counts, whichever API server is asked."""
    server.wait_until_idle()

    def add_up() -> bool:
        found: dict[str, float] = {}
        for one in server.samples():
            found[one.name] = found.get(one.name, 0) + one.value
        trees = found["sequoia:trees_total"]
        accepted = found["sequoia:emitted_tokens_total"] - trees
        return (
            found["vllm:generation_tokens_total"] == tokens
            and trees == found["vllm:spec_decode_num_drafts_total"] > 0
            and trees == found["sequoia:accepted_depth_total"]
            and accepted == found["vllm:spec_decode_num_accepted_tokens_total"] > 0
        )

    for _ in range(8):
        wait_until(add_up, 10, "the metrics' sums")


def test_all_end_when_one_of_two_api_servers_is_killed(tmp_path, monkeypatch):
    """vLLM ends all, and leaves it to its supervisor to start again (vllm#23776).

    Until then answers are plain vLLM's, and what both servers count adds up.
    """
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))
    options = (
        "--data-parallel-size=2", "--api-server-count=2", "--distributed-executor-backend=uni",
        f"--speculative-config={json.dumps(sequoia())}",
    )  # fmt: skip
    with Server(tmp_path / "server.log", *options, forks=True) as server:
        answers, tokens = answered(server)
        assert answers == plain_outputs(TEXTS, SamplingParams(**SHORT))
        check_sums(server, tokens)
        family = [server.process, *server.process.children(recursive=True)]
        assert len(family) >= 5, "two API servers and two cores were expected"
        assert kill_amid_a_step(server, "VLLM::APIServer_1") is not None
        left = wait_for_end(family, SECONDS_TO_END)
        assert left == [], f"left behind: {left}; {server.tail}"
        assert "Process ApiServer_1" in server.log
