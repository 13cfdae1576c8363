"""Two ranks on Model Runner V2: their trees, and their tokens, are those of one rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.cores import needs_two_cores
from tests.engine.conftest import running, sequoia
from tests.v2.conftest import call_on_v2
from tests.v2.generating import TINY, completions, random_prompts, save_related_pair

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def generate_on_ranks(target: str, draft: str) -> dict[str, Any]:
    """Greedy, seeded and unseeded requests, of trees on one rank and on two."""
    from vllm import SamplingParams

    prompts = random_prompts([9, 14, 6])
    params = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=1, max_tokens=8, ignore_eos=True, detokenize=False),
    ]
    answers: dict[str, Any] = {}
    config = sequoia(size=8, depth=3, draft=draft)
    for name, options in (
        ("one rank", {}),
        ("two ranks", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    ):
        with running(config, model=target, **TINY, **options) as llm:
            answers[name] = completions(llm.generate(prompts, params, use_tqdm=False))
            answers[f"{name}, counted"] = llm.collective_rpc("sequoia_stats")
    return answers


@needs_two_cores
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    target, draft = save_related_pair(tmp_path, **heads)
    answers = call_on_v2(generate_on_ranks, tmp_path, target=target, draft=draft)
    assert answers["two ranks"] == answers["one rank"]
    first, second = [
        (rank["tree_steps"], rank["tokens"], rank["depth_counts"])
        for rank in answers["two ranks, counted"]
    ]
    assert first == second
    assert first[1] > 1.2 * first[0] > 0
