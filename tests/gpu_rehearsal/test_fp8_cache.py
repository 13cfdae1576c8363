"""A KV cache in fp8 on vLLM's GPU engine: trees read what plain decoding reads of it."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.calling import called_once
from tests.support.engines import runner_of, sequoia
from tests.support.generating import random_prompts, save_related_pair
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import generate, generate_with_trees, rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def params() -> list[Any]:
    common = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=0, **common), SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=3, **common),
    ]  # fmt: skip


def start_and_generate(models: str, backend: str) -> dict[str, Any]:
    """Answers of plain vLLM and of trees, with scales that are not 1, and with a whole cache."""
    target, draft = save_related_pair(Path(models))
    options = {"model": target, "kv_cache_dtype": "fp8", "attention_backend": backend}
    requests, trees = random_prompts([9, 40, 13]), sequoia(size=8, depth=3, draft=draft)
    answers: dict[str, Any] = {}
    for name, config in (("plain", None), ("trees", trees)):
        with rehearsing(config, **options) as llm:
            for layer in layers(llm):
                layer._q_scale.fill_(0.5)
                layer._k_scale.fill_(0.25)
                layer._v_scale.fill_(2.0)
            run = generate if config is None else generate_with_trees
            answers[name] = run(llm, requests, params())
            answers[f"{name}: bytes"] = runner_of(llm).kv_caches[0].element_size()
    with rehearsing(None, model=target) as llm:
        answers["whole"] = generate(llm, requests, params())
    return answers


def layers(llm: Any) -> list[Any]:
    context = runner_of(llm).vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if hasattr(layer, "_k_scale")]


BACKENDS = ["FLASH_ATTN", "TRITON_ATTN"]
answers = called_once(call_on_gpu, start_and_generate, ("backend", BACKENDS))


def test_tokens_are_those_of_plain_vllm_with_the_same_cache(answers, request):
    """vLLM's Triton kernel rounds weights of attention to fp8, and ours does not."""
    rounds = request.node.callspec.params["answers"] == "TRITON_ATTN"
    for [found], [expected] in zip(
        answers["trees"]["tokens"], answers["plain"]["tokens"], strict=True
    ):
        alike = 6 if rounds else len(expected)
        assert found[:alike] == expected[:alike]
    assert answers["trees"]["counts"]["tokens_per_tree"] > 1.2
    assert answers["trees"]["eager growth"] == []
    assert (answers["plain: bytes"], answers["trees: bytes"]) == (1, 1)


def test_the_cache_is_quantized(answers):
    assert answers["plain"]["tokens"] != answers["whole"]["tokens"]
