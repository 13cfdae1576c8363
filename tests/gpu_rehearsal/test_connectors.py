"""Prefixes that vLLM's GPU engine stores a step late, while the next trees are written."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.support.calling import called_once
from tests.support.engines import sequoia
from tests.support.generating import save_related_pair
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import rehearsing
from tests.support.stored_cache import CONNECTOR, LENGTHS, converse_twice

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]


def converse(models: str) -> dict[str, Any]:
    """Two turns, by plain vLLM and by trees whose second turns are loaded."""
    target, draft = save_related_pair(Path(models))
    with rehearsing(None, model=target) as llm:
        answers = {"plain": converse_twice(llm, trees=False)}
    transfer = KVTransferConfig(**CONNECTOR)
    config = sequoia(size=8, depth=3, draft=draft)
    with rehearsing(config, model=target, kv_transfer_config=transfer) as llm:
        return answers | {"trees": converse_twice(llm, trees=True)}


answers = called_once(call_on_gpu, converse)


def test_turns_on_loaded_keys_are_those_of_plain_vllm(answers):
    found, plain = answers["trees"], answers["plain"]
    assert found["loaded"] == sum((length + 49) // 16 * 16 for length in LENGTHS)
    assert found["tokens"] == plain["tokens"]
    assert min(found["tokens per tree"]) > 1.5
