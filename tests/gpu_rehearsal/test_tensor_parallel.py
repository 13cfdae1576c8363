"""Two ranks of the GPU engine, over gloo: their reductions are part of the graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.quick_start.quick_imports import FORK_ENGINES
from tests.support.cores import needs_two_cores
from tests.support.engines import sequoia
from tests.support.generating import VOCAB, completions, random_prompts, save_related_pair
from tests.support.heads import save_eagle3
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

PROMPTS = random_prompts([9, 14, 6])
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def graphs_of(worker: Any) -> dict[str, Any]:
    """Called in each rank."""
    from gpu_stand_in import graphs

    return graphs.report()


def perturb_second_rank(worker: Any) -> None:
    """Called in each rank: from now on the second draws other drafts, from other logits."""
    if worker.rank == 0:
        return
    runner, proposer = worker.model_runner, worker.model_runner.speculator
    compute_logits, replay = runner.model.compute_logits, proposer._growth_graphs.replay

    def other_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        return logits + 3 * torch.randn_like(logits)

    def other_drafts(num_trees: int, drafts: int) -> bool:
        ran = replay(num_trees, drafts)
        proposer.drafted.tokens.add_(1).remainder_(VOCAB)
        return ran

    runner.model.compute_logits, proposer._growth_graphs.replay = other_logits, other_drafts


def generate_on_ranks(target: str, draft: str, kept: list[int] | None = None) -> dict[str, Any]:
    """Greedy, seeded and unseeded requests: of trees on two ranks and on one."""
    common = {"max_tokens": 8, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1, seed=5, **common),
        SamplingParams(temperature=1, **common),
    ]
    config = sequoia(size=6, depth=2, draft=draft, draft_vocabulary=kept)
    answers = {}
    for name, options in (
        ("one rank", {}),
        ("two ranks", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    ):
        with rehearsing(config, model=target, **options) as llm:
            answers[name] = completions(llm.generate(PROMPTS, params, use_tqdm=False))
            if options:
                llm.collective_rpc(perturb_second_rank)
                disturbed = completions(llm.generate(PROMPTS[:2], params[:2], use_tqdm=False))
                answers["disturbed"] = disturbed
            answers["counts"] = llm.collective_rpc("sequoia_stats")
            answers["graphs"] = llm.collective_rpc(graphs_of)
    return answers


@needs_two_cores
def test_two_ranks_replay_graphs_and_give_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions to the ranks
    monkeypatch.setenv(FORK_ENGINES, "1")  # like users' engines on GPUs
    target, draft = save_related_pair(tmp_path, **HEADS)
    kept = list(range(0, VOCAB, 3)) + list(range(1, 100, 3))  # most of them the first rank's
    found = call_on_gpu(generate_on_ranks, tmp_path, target=target, draft=draft, kept=kept)
    check_ranks(found)
    [first, _] = found["counts"]
    assert first["tokens"] > 1.2 * first["tree_steps"]


@needs_two_cores
def test_two_ranks_draft_with_a_head_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose weights are random: hardly anything is accepted."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv(FORK_ENGINES, "1")
    target, _ = save_related_pair(tmp_path, num_hidden_layers=2, **HEADS)
    head = save_eagle3(tmp_path / "head", target, list(range(2, 130)))
    found = call_on_gpu(generate_on_ranks, tmp_path, target=target, draft=head)
    check_ranks(found)


def check_ranks(found: dict[str, Any]) -> None:
    """One rank's tokens, from graphs of both, which count the same; the second's do not matter."""
    assert found["two ranks"] == found["one rank"]
    assert found["disturbed"] == found["one rank"][:2]
    first, second = [
        (rank["tree_steps"], rank["tokens"], rank["depth_counts"]) for rank in found["counts"]
    ]
    assert first == second
    assert first[0] > 0
    for rank in found["graphs"]:
        assert rank["replayed"]["DraftGraphs"] > 0
        assert rank["replayed"]["TreeGraphManager"] > 0
