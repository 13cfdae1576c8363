"""Two ranks draft, verify and commit the same trees, and their output is that of one rank."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.cores import needs_two_cores
from tests.support.engines import lookup_trees, metric, running, sequoia, tokens_of
from tests.support.models import prompts

pytestmark = pytest.mark.engine


def perturb_second_rank(worker: Any) -> None:
    """Called in each rank: from now on the second's logits are others, the draft's, too."""
    if worker.rank == 1:
        for model in (worker.model_runner.model, worker.model_runner.drafter.model):
            if hasattr(model, "compute_logits"):
                model.compute_logits = with_noise(model.compute_logits)


def with_noise(compute_logits: Any) -> Any:
    def other_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        return logits + 3 * torch.randn_like(logits)

    return other_logits


@needs_two_cores
@pytest.mark.parametrize(
    "config",
    [
        sequoia(draft_vocabulary=3000, dynamic_tree=True),
        pytest.param(lookup_trees(), marks=pytest.mark.nightly),
    ],
    ids=["model", "lookup"],
)
def test_two_ranks_give_the_tokens_of_one(config, plain_outputs, monkeypatch):
    """In float32, where the order of the ranks' sums changes no token.

    The draft keeps 3,000 of 4,096 rows of its output layer, 2,048 of which the first rank had.
    Then the second rank computes other logits: what it would draw counts for nothing.
    """
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions to the ranks
    texts = prompts(8)
    params = [
        *[SamplingParams(temperature=0, max_tokens=32) for _ in range(3)],
        *[SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=32) for i in range(3)],
    ]
    unseeded = [SamplingParams(temperature=1.0, max_tokens=32)] * 2
    expected = plain_outputs(texts[:6], params)
    # One thread per rank, on any core: a rank pinned to a busy core holds up both.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running(config, **options) as llm:
        found = tokens_of(llm.generate(texts, params + unseeded, use_tqdm=False))
        ranks = llm.collective_rpc("sequoia_stats")
        shown = metric(llm, "sequoia:trees")
        llm.collective_rpc(perturb_second_rank)
        disturbed = tokens_of(llm.generate(texts, params + unseeded, use_tqdm=False))
        counts = [rank["depth_counts"] for rank in llm.collective_rpc("sequoia_stats")]
    assert disturbed[:6] == found[:6] == expected
    assert counts[0] == counts[1]
    first, second = [(r["steps"], r["tree_steps"], r["tokens"], r["depth_counts"]) for r in ranks]
    assert first == second
    assert shown == ranks[0]["tree_steps"]  # one rank's count, not the sum of both
    assert ranks[0]["tokens"] > 1.2 * ranks[0]["tree_steps"] > 0
