"""Engines in processes of their own: two ranks draft one rank's trees; a core, compiled."""

import json
import subprocess
import sys
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.cores import needs_two_cores
from tests.support.engines import (
    generated,
    lookup_trees,
    metric,
    plain_outputs,
    running,
    sequoia,
    whole_trees,
)
from tests.support.generating import random_prompts, save_related_pair, with_noise
from tests.support.models import prompts
from tests.support.serving import environment

pytestmark = pytest.mark.engine


def perturb_second_rank(worker: Any) -> None:
    """Called in each rank: from now on the second's logits are others, the draft's, too."""
    if worker.rank == 1:
        for model in (worker.model_runner.model, worker.model_runner.drafter.model):
            if hasattr(model, "compute_logits"):
                model.compute_logits = with_noise(model.compute_logits)


@needs_two_cores
@pytest.mark.parametrize(
    "config",
    [
        sequoia(
            draft_vocabulary=3000, dynamic_tree=True,  # five nodes each in the mean, of up to ten
            num_speculative_tokens_per_batch_size=[[1, 1, 15], [2, 256, 5]],
        ),
        pytest.param(lookup_trees(), marks=pytest.mark.sharded),
    ],
    ids=["model", "lookup"],
)  # fmt: skip
def test_two_ranks_give_the_tokens_of_one(config, monkeypatch):
    """In float32, where the order of the ranks' sums changes no token.

    The draft keeps 3,000 of 4,096 rows of its output layer, 2,048 of which the first rank had.
    Then the second rank computes other logits: what it would draw counts for nothing.
    """
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions to the ranks
    texts = prompts(8)
    params = [
        *[SamplingParams(temperature=0, max_tokens=20) for _ in range(3)],
        *[SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=20) for i in range(3)],
    ]
    unseeded = [SamplingParams(temperature=1.0, max_tokens=20)] * 2
    expected = plain_outputs(texts[:6], params)
    # One thread per rank, on any core: a rank pinned to a busy core holds up both.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running(config, **options) as llm:
        found = generated(llm, texts, params + unseeded)
        ranks = llm.collective_rpc("sequoia_stats")
        shown = metric(llm, "sequoia:trees")
        llm.collective_rpc(perturb_second_rank)
        disturbed = generated(llm, texts, params + unseeded)
        counts = [rank["depth_counts"] for rank in llm.collective_rpc("sequoia_stats")]
    assert disturbed[:6] == found[:6] == expected
    assert counts[0] == counts[1]
    first, second = [(r["steps"], r["tree_steps"], r["tokens"], r["depth_counts"]) for r in ranks]
    assert first == second
    assert shown == ranks[0]["tree_steps"]  # one rank's count, not the sum of both
    assert ranks[0]["tokens"] > 1.2 * ranks[0]["tree_steps"] > 0


# It never imports sequoia_vllm: vLLM finds the plugin by its entry point. The engine's core is
# forked; `tests/server/test_serve.py` spawns one.
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, prompts, speculative_config = map(json.loads, sys.argv[1:])
    llm = LLM(model=model, dtype="float32", max_model_len=256, max_num_seqs=8, seed=0,
              kv_cache_memory_bytes=64 << 20, speculative_config=speculative_config,
              skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=32, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    [stats] = llm.collective_rpc("sequoia_stats")
    sampled = SamplingParams(temperature=1, max_tokens=32, ignore_eos=True, detokenize=False)
    sampled = llm.generate(prompts, sampled, use_tqdm=False)
    [after] = llm.collective_rpc("sequoia_stats")
    settings = llm.llm_engine.vllm_config.speculative_config._sequoia
    print("RESULT" + json.dumps({
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "core": type(llm.llm_engine.engine_core).__name__,
        "mode": llm.llm_engine.vllm_config.compilation_config.mode.name,
        "verification": settings.verification,
        "stats": stats,
        "sampled": [len(o.outputs[0].token_ids) for o in sampled],
        "sampled trees": after["tree_steps"] - stats["tree_steps"],
    }))
"""


@pytest.mark.sharded
def test_same_tokens_from_a_compiled_engine_in_other_processes(tmp_path):
    target, draft = save_related_pair(tmp_path)
    requests = random_prompts([9, 20, 14, 31])
    params = SamplingParams(temperature=0, max_tokens=32, detokenize=False)
    expected = plain_outputs(requests, params, model=target, skip_tokenizer_init=True)
    # What is greedy is matched. Adapting would end drafting at once where cores are busy.
    kept = list(range(240))
    config = whole_trees(draft=draft, verification="traversal", draft_vocabulary=kept)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(json.dumps, (target, requests, config))],
        env=environment(forks=True), capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    result = json.loads(line.removeprefix("RESULT"))
    assert result["tokens"] == expected
    assert result["core"] == "SyncMPClient"
    assert result["mode"] != "NONE"  # it was compiled
    assert result["stats"]["tokens"] > 1.5 * result["stats"]["tree_steps"] > 0
    assert result["verification"] == "traversal"
    assert result["sampled"] == [32] * len(requests)
    assert 0 < result["sampled trees"] < 31 * len(requests)
