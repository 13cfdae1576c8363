"""Trees over latent attention (`DeepseekV3ForCausalLM`) with what GPUs have, in float32.

Plain tokens are those of vLLM's TRITON_MLA in the same process. Prompts are read by the CPU's code.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.calling import called_once
from tests.support.engines import metric, running, whole_trees
from tests.support.generating import (
    generate,
    generate_on,
    greedy_and_seeded,
    random_prompts,
)
from tests.support.latents import VOCABULARY, save_latent_pair
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS = {"skip_tokenizer_init": True, "block_size": 16}
LENGTHS = [9, 40, 23, 70]
TOKENS, SIZE = 20, 8


def params() -> list[Any]:
    """Greedy and seeded in turn; the third is never drafted for."""
    found = greedy_and_seeded(len(LENGTHS), TOKENS)
    found[2].extra_args = {"sequoia_max_drafts": 0}
    return found


def generate_all(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees: twice, the second time with cached prefixes."""
    target, draft = save_latent_pair(Path(models))
    prompts, options = random_prompts(LENGTHS, VOCABULARY), {"model": target, **OPTIONS}
    answers: dict[str, Any] = {"plain": generate(None, prompts, params(), **options)}
    with running(whole_trees(SIZE, draft=draft), **options, enable_prefix_caching=True) as llm:
        answers["trees"] = generate_on(llm, prompts, params())
        answers["cached"] = generate_on(llm, prompts, params())
        answers["hits"] = metric(llm, "vllm:prefix_cache_hits")
    answers["pressed"] = generate(
        whole_trees(SIZE, draft=draft), prompts, params(), num_gpu_blocks_override=14,
        max_model_len=128, max_num_batched_tokens=48, **options,
    )  # fmt: skip
    return answers


def generate_whole(models: str) -> dict[str, Any]:
    """The same where vLLM keeps whole keys and values, in layers of ordinary attention."""
    os.environ["VLLM_MLA_DISABLE"] = "1"
    target, draft = save_latent_pair(Path(models))
    prompts, options = random_prompts(LENGTHS, VOCABULARY), {"model": target, **OPTIONS}
    plain = generate(None, prompts, params(), **options)
    return {
        "plain": plain,
        "trees": generate(whole_trees(SIZE, draft=draft), prompts, params(), **options),
    }


answers = called_once(call_on_v2, generate_all, gpu_attention=True)


@pytest.mark.parametrize("case", ["trees", "cached", "pressed"])
def test_tokens_are_those_of_plain_vllm(case, answers):
    """Beside a request without drafts, and prompts in pieces."""
    found = answers[case]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert found["counts"]["accepted_tokens"] > 20


def test_what_ran(answers):
    assert answers["plain"]["attention"] == "TritonMLAImpl"
    assert answers["trees"]["attention"] == "MLATreeImpl"
    assert answers["hits"] > 0
    assert answers["pressed"]["counts"]["preemptions"] > 0


@pytest.mark.nightly
def test_whole_keys_and_values(tmp_path):
    found = call_on_v2(generate_whole, tmp_path, gpu_attention=True, models=str(tmp_path))
    assert found["trees"]["tokens"] == found["plain"]["tokens"]
    assert found["trees"]["counts"]["accepted_tokens"] > 20
    assert found["trees"]["attention"] != "MLATreeImpl"
