"""Two ranks of the GPU engine, over gloo: their reductions are part of the graphs."""

from pathlib import Path
from typing import Any

import pytest

from tests.cores import needs_two_cores
from tests.engine.conftest import sequoia
from tests.gpu_rehearsal.environment import call_on_gpu
from tests.gpu_rehearsal.generating import rehearsing
from tests.v2.generating import completions, random_prompts, save_related_pair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def graphs_of(worker: Any) -> dict[str, Any]:
    """Called in each rank."""
    from gpu_stand_in import graphs

    return graphs.report()


def generate_on_ranks(models: str) -> dict[str, Any]:
    """Greedy, seeded and unseeded requests, of trees on one rank and on two."""
    from vllm import SamplingParams

    target, draft = save_related_pair(Path(models), **HEADS)
    common = {"max_tokens": 8, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1, seed=5, **common),
        SamplingParams(temperature=1, **common),
    ]
    prompts, answers = random_prompts([9, 14, 6]), {}
    for ranks in (1, 2):
        with rehearsing(
            sequoia(size=6, depth=2, draft=draft), model=target,
            tensor_parallel_size=ranks, distributed_executor_backend="mp",
        ) as llm:  # fmt: skip
            answers[str(ranks)] = {
                "tokens": completions(llm.generate(prompts, params, use_tqdm=False)),
                "counts": llm.collective_rpc("sequoia_stats"),
                "graphs": llm.collective_rpc(graphs_of),
            }
    return answers


@needs_two_cores
def test_two_ranks_replay_graphs_and_give_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions to the ranks
    answers = call_on_gpu(generate_on_ranks, tmp_path, models=str(tmp_path))
    assert answers["2"]["tokens"] == answers["1"]["tokens"]
    first, second = [
        (rank["tree_steps"], rank["tokens"], rank["depth_counts"])
        for rank in answers["2"]["counts"]
    ]
    assert first == second
    assert first[1] > 1.2 * first[0] > 0
    for rank in answers["2"]["graphs"]:
        assert rank["replayed"]["DraftGraphs"] > 0
        assert rank["replayed"]["TreeGraphManager"] > 0
