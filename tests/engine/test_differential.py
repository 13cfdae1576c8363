"""Random requests of all kinds in one engine, on a KV cache too small for them: plain's answers.

Each kind of trees has 150 requests, and every parameter is in some of them: all kinds of requests
are served, amid preemptions and beside chunks of prompts. Rare parameters meet in few batches here;
``SEQUOIA_VLLM_SOAK`` says how many requests each has instead. Only requests with one right answer
are compared, and those are matched: traversal merely runs beside them.
"""

import os

import pytest

from tests.support.engines import lookup_trees, metric, running, sequoia
from tests.support.models import prompts
from tests.support.soak.in_engine import answers, differences, kv_cache_usage
from tests.support.soak.random_requests import random_requests

pytestmark = pytest.mark.engine

COUNT = int(os.environ.get("SEQUOIA_VLLM_SOAK", "150"))
REQUESTS = random_requests(prompts(32), 2 * COUNT, seed=14, vocabulary=4096)
NIGHTLY = pytest.mark.nightly
TREES = [
    pytest.param(
        sequoia(verification="sequoia", retrieval=True, dynamic_tree=True),
        REQUESTS[:COUNT], id="sequoia",
    ),
    pytest.param(
        sequoia(verification="traversal", retrieval=True), REQUESTS[COUNT:],
        id="traversal", marks=NIGHTLY,
    ),
    pytest.param(lookup_trees(), REQUESTS[:COUNT], id="lookup", marks=NIGHTLY),
]  # fmt: skip
OPTIONS = {
    "kv_cache_memory_bytes": 8 << 20,  # some 50 and 100 preemptions
    "block_size": 32,
    "max_num_batched_tokens": 96,  # prompts are read in chunks
    "enable_prefix_caching": True,
}


@pytest.mark.parametrize(("trees", "requests"), TREES)
def test_random_requests(trees, requests):
    # With memory for all: plain vLLM stops on CPUs where a seeded prompt is read in chunks.
    with running(None, max_num_batched_tokens=8192) as llm:
        plain = answers(llm, requests, leaving=False)
    with running(trees, **OPTIONS) as llm:
        different = differences(llm, requests, plain)
        assert not different, "\n".join(map(str, different))
        assert kv_cache_usage(llm) == 0.0
        assert metric(llm, "vllm:num_preemptions") > 10
        assert metric(llm, "vllm:prefix_cache_hits") > 1000
        assert metric(llm, "sequoia:trees") > 1000
