"""Two ranks of the GPU engine, over gloo: their reductions are part of the graphs."""

from pathlib import Path
from typing import Any

import pytest

from tests.cores import needs_two_cores
from tests.engine.conftest import running, sequoia
from tests.gpu_rehearsal.environment import call_on_gpu
from tests.gpu_rehearsal.generating import rehearsing
from tests.v2.generating import completions, random_prompts, save_related_pair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = random_prompts([9, 14])
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def graphs_of(worker: Any) -> dict[str, Any]:
    """Called in each rank."""
    from gpu_stand_in import graphs

    return graphs.report()


def generate_on_ranks(target: str, draft: str) -> dict[str, Any]:
    """A greedy and an unseeded request, of trees on two ranks."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, detokenize=False)
        for temperature in (0, 1)
    ]
    with rehearsing(
        sequoia(size=6, depth=2, draft=draft), model=target, max_num_seqs=2,
        tensor_parallel_size=2, distributed_executor_backend="mp",
    ) as llm:  # fmt: skip
        return {
            "tokens": completions(llm.generate(PROMPTS, params, use_tqdm=False)),
            "counts": llm.collective_rpc("sequoia_stats"),
            "graphs": llm.collective_rpc(graphs_of),
        }


@needs_two_cores
def test_two_ranks_replay_graphs_and_give_plain_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions to the ranks
    target, draft = save_related_pair(tmp_path, **HEADS)
    found = call_on_gpu(generate_on_ranks, tmp_path, target=target, draft=draft)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with running(None, model=target, skip_tokenizer_init=True) as llm:
        [plain] = completions(llm.generate(PROMPTS[:1], params, use_tqdm=False))
    assert found["tokens"][0] == plain
    first, second = [
        (rank["tree_steps"], rank["tokens"], rank["depth_counts"]) for rank in found["counts"]
    ]
    assert first == second
    assert first[1] > 1.2 * first[0] > 0
    for rank in found["graphs"]:
        assert rank["replayed"]["DraftGraphs"] > 0
        assert rank["replayed"]["TreeGraphManager"] > 0
