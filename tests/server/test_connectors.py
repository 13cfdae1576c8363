"""``vllm serve`` with trees and vLLM's OffloadingConnector: a later turn is loaded from its store.

The store is the tests' own, in host memory: vLLM's refuses devices other than GPUs.
"""

import json
from typing import Any

import httpx
import pytest
from vllm import SamplingParams

from tests import quick_start
from tests.support import serving
from tests.support.engines import running
from tests.support.models import prompts
from tests.support.serving import DRAFT, ROOT, Server, environment
from tests.support.stored_cache import CONNECTOR

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

TREES = {"method": "sequoia", "model": DRAFT, "tree": {"size": 8, "depth": 3}, "adapt": False}
STORE = CONNECTOR["kv_connector_extra_config"]
OPTIONS = {
    "--kv-transfer-config": ["--kv-transfer-config", json.dumps(CONNECTOR)],
    # It names connector and role itself; only the tests' store is added.
    "--kv-offloading-size": [
        "--kv-offloading-size=0.01",
        "--kv-transfer-config", json.dumps({"kv_connector_extra_config": STORE}),
    ],
}  # fmt: skip
SMALL = [option for option in serving.OPTIONS if "host" not in option]
PROMPT, TOKENS, BLOCK = "\n".join(prompts(2)), 70, 32


def asked_next(prompt: list[int], answer: list[int]) -> list[int]:
    return [*prompt, *answer, 300, 301]


def plain_turns() -> list[list[int]]:
    """Two turns' tokens of plain vLLM, which stores nothing."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with running(block_size=BLOCK) as llm:
        [first] = llm.generate(PROMPT, params, use_tqdm=False)
        answer = list(first.outputs[0].token_ids)
        again = {"prompt_token_ids": asked_next(first.prompt_token_ids, answer)}
        [second] = llm.generate(again, params, use_tqdm=False)
        return [answer, list(second.outputs[0].token_ids)]


def served_turns(server: Server) -> list[list[int]]:
    """The same over HTTP. Between them the engine's own cache is emptied, and not the store.

    A step's last blocks are stored in a later step, which another request brings. Until then they
    are held, and vLLM does not empty its cache.
    """
    turns: list[list[int]] = []
    asked: Any = PROMPT
    for _ in range(2):
        [choice] = server.complete(
            prompt=asked, temperature=0, max_tokens=TOKENS, extra_body={"return_token_ids": True}
        ).choices
        turns.append(choice.token_ids)
        for _ in range(20):
            server.complete(prompt="another", max_tokens=1)
            done = httpx.post(f"{server.url}/reset_prefix_cache", trust_env=False, timeout=60)
            if done.json()["success"]:
                break
        assert done.json()["success"]
        asked = asked_next(choice.prompt_token_ids, choice.token_ids)
    return turns


@pytest.mark.parametrize("option", OPTIONS)
def test_a_later_turn_is_loaded_from_the_store(option, tmp_path):
    variables = environment(forks=True) | {
        "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": f"{quick_start.FOLDER}:{ROOT}",
    }  # fmt: skip
    server = Server(
        tmp_path / "log", *SMALL, f"--block-size={BLOCK}",
        "--speculative-config", json.dumps(TREES), *OPTIONS[option], variables=variables,
    )  # fmt: skip
    try:
        server.wait_until_healthy()
        assert served_turns(server) == plain_turns()
        # Also blocks of the first answer, behind which trees wrote.
        [loaded] = server.metric("vllm:external_prefix_cache_hits_total")
        assert loaded % BLOCK == 0
        assert loaded > TOKENS
        [accepted] = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert accepted > 30
    finally:
        server.kill()
