"""``vllm serve --data-parallel-size 2``: replicas that know nothing of each other's trees."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm import SamplingParams

from tests.support.engines import running, sequoia, tokens_of
from tests.support.models import prompts
from tests.support.serving import Server

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

LONG = {"temperature": 0, "max_tokens": 48, "extra_body": {"return_token_ids": True}}
SHORT = {"temperature": 0, "max_tokens": 1}  # nothing to draft


def test_two_replicas_answer_as_plain_vllm(tmp_path, monkeypatch):
    """They adapt, as nothing is said of it, and begin with drafts, as nothing was learned."""
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))
    texts = prompts(8)
    with running() as llm:
        params = SamplingParams(temperature=0, max_tokens=48)
        expected = tokens_of(llm.generate(texts, params, use_tqdm=False))
    config = sequoia()
    del config["adapt"]
    server = Server(
        tmp_path / "server.log",
        "--data-parallel-size=2",
        "--api-server-count=1",
        "--distributed-executor-backend=uni",  # a process less for each
        "--speculative-config",
        json.dumps(config),
        forks=True,
    )
    try:
        server.wait_until_healthy()
        alone = server.complete(prompt=texts[0], **LONG)  # the other replica has nothing to do
        with ThreadPoolExecutor(12) as pool:
            short = [pool.submit(server.complete, prompt=text, **SHORT) for text in texts[:4]]
            long = [pool.submit(server.complete, prompt=text, **LONG) for text in texts]
        found = [future.result().choices[0].token_ids for future in long]
        assert [future.result().usage.completion_tokens for future in short] == [1] * 4
        trees = server.metric("sequoia:trees_total")
        server.stop(signal.SIGINT)
    finally:
        server.kill()
    assert found == expected
    assert alone.choices[0].token_ids == expected[0]
    assert len(trees) == 2
    assert min(trees) > 0  # both drafted
