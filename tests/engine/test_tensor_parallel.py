"""Two ranks draft, verify and commit the same trees (float32: the sums' order matters less)."""

import os

import pytest
from vllm import SamplingParams

from tests.engine.conftest import running, sequoia, tokens_of
from tests.engine.models import prompts

pytestmark = pytest.mark.engine

CORES = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []


@pytest.mark.skipif(len(CORES) < 2, reason="tensor parallelism of 2 needs two CPU cores")
def test_two_ranks_give_the_tokens_of_one(plain_outputs, monkeypatch):
    texts = prompts(8)
    params = [
        SamplingParams(temperature=0, max_tokens=32) if i % 2 == 0
        else SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=32)
        for i in range(8)
    ]  # fmt: skip
    unseeded = [SamplingParams(temperature=1.0, max_tokens=24)] * 2
    expected = plain_outputs(texts, params)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", os.environ.get("BINDX", "nobind"))
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running(sequoia(), **options) as llm:
        outputs = llm.generate(texts + texts[:2], params + unseeded, use_tqdm=False)
        ranks = llm.collective_rpc("sequoia_stats")
    assert tokens_of(outputs)[:8] == expected
    first, second = [(r["steps"], r["tree_steps"], r["tokens"], r["depth_counts"]) for r in ranks]
    assert first == second
    assert ranks[0]["tokens"] > 1.2 * ranks[0]["tree_steps"] > 0
