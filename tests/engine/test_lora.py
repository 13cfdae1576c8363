"""Adapters on the target: every request's tokens are those that plain vLLM gives it."""

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.support.adapters import RANK, save_adapter
from tests.support.engines import metric, running, sequoia, tokens_of
from tests.support.models import prompts

pytestmark = pytest.mark.engine

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """No adapter, one and another, in turn."""
    folder = tmp_path_factory.mktemp("adapters")
    first, second = (
        LoRARequest(name, number, save_adapter(folder / name, number))
        for number, name in enumerate(("first", "second"), start=1)
    )
    return [None, first, second] * 2


def params(seed):
    return [
        SamplingParams(
            temperature=0.0 if row % 2 else 0.8, seed=seed + row, max_tokens=40, ignore_eos=True
        )
        for row in range(6)
    ]


def outputs(llm, adapters, seed):
    found = llm.generate(prompts(6), params(seed), lora_request=adapters, use_tqdm=False)
    return tokens_of(found)


def test_adapters_and_none_in_one_batch(adapters):
    """Greedy and seeded; again with what the prefix cache has of each adapter's prompts."""
    with running(None, **LORA) as llm:
        plain = [outputs(llm, adapters, seed) for seed in (0, 0, 7)]
        without = outputs(llm, None, 0)
    # (On CPUs, vLLM's kernels give a request without an adapter the last one of the batch.)
    assert all(plain[0][row] != without[row] for row in (1, 2, 4, 5))
    with running(sequoia(), **LORA) as llm:
        assert [outputs(llm, adapters, seed) for seed in (0, 0, 7)] == plain
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 50
