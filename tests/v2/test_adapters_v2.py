"""Adapters on the target, on Model Runner V2: every request's tokens are plain vLLM's."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.adapters import RANK, save_adapter
from tests.support.engines import running, sequoia
from tests.support.generating import completions, counted
from tests.support.models import prompts
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def generate_with_adapters(folder: str) -> dict[str, Any]:
    """Answers of plain V2 and of trees: no adapter, one and another; greedy and seeded."""
    from vllm.lora.request import LoRARequest

    first, second = (
        LoRARequest(name, number, save_adapter(Path(folder) / name, number))
        for number, name in enumerate(("first", "second"), start=1)
    )
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=12, ignore_eos=True)
        for seed, temperature in enumerate((0.0, 0.0, 0.0, 0.8, 0.8))
    ]
    adapters = [None, first, second, first, second]
    texts = [*prompts(1) * 3, *prompts(3)[1:]]
    answers: dict[str, Any] = {}
    for name, config in (("plain", None), ("trees", sequoia())):
        with running(config, **LORA) as llm:
            answers[name] = completions(
                llm.generate(texts, params, lora_request=adapters, use_tqdm=False)
            )
            if config:
                answers["accepted"] = counted(llm)["accepted_tokens"]
    return answers


def test_adapters_and_none_in_one_batch(tmp_path):
    found = call_on_v2(generate_with_adapters, tmp_path, folder=str(tmp_path))
    plain = found["plain"]
    # The same prompt. (On CPUs, vLLM gives a request without an adapter the last of the batch.)
    assert plain[1] != plain[2]
    assert found["trees"] == plain
    assert found["accepted"] > 3
