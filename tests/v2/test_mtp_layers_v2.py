"""Trees drafted by a target's own MTP layer: tokens as plain V2's, drafts as in vLLM's own chain.

Tiny targets with random weights, whose tokens mostly follow from the one before: a dense one, and
mixtures of experts, one of them with recurrent layers.
"""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engines import running
from tests.support.expert_layers import KINDS, save_experts
from tests.support.generating import (
    SPEC_DECODE,
    TINY,
    generate,
    generate_chain,
    generate_on,
    random_prompts,
)
from tests.support.heads import save_mimo
from tests.support.on_v2 import call_on_v2
from tests.support.recurrent import run_chains, run_in_float32

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

DEPTH, TOKENS = 3, 20


def trees(size: int) -> dict[str, Any]:
    """No model is named: the layer lies in the target's checkpoint."""
    return {
        "method": "sequoia",
        "drafter": "mtp",
        "tree": {"size": size, "depth": DEPTH},
        "adapt": False,
        "retrieval": False,
        "num_speculative_tokens_per_batch_size": [[1, 1, size - 1]],
    }


def parameters(temperature: float, count: int) -> list[Any]:
    common = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=temperature, seed=index if temperature else None, **common)
        for index in range(count)
    ]


def generate_all(target: str, is_hybrid: bool) -> dict[str, Any]:
    if is_hybrid:
        run_in_float32()
        run_chains()
    texts, greedy = random_prompts([9, 20, 70]), parameters(0, 3)
    chain = {"method": "mtp", "num_speculative_tokens": DEPTH}
    options = {"model": target, "max_num_batched_tokens": 64, **TINY}
    answers = {
        "plain": generate(None, texts, greedy, **options),
        "chain": generate(trees(DEPTH + 1), texts, greedy, **options),
        "vLLM's chain": generate_chain(
            chain, texts, greedy, **options, enable_prefix_caching=False
        ),
    }
    with running(trees(12), **options) as llm:
        answers["tree"] = generate_on(llm, texts, greedy)
        answers["again"] = generate_on(llm, texts, greedy)
        answers["sampled"] = generate_on(llm, texts, parameters(0.8, 3))
    return answers


@pytest.fixture(scope="module", params=["MiMo", *KINDS])
def answers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("mtp")
    folder, kind = directory / "target", request.param
    target = save_mimo(folder) if kind == "MiMo" else save_experts(folder, kind)
    is_hybrid = kind == "Qwen3Next"
    return call_on_v2(
        generate_all, directory, gpu_attention=is_hybrid, target=target, is_hybrid=is_hybrid
    )


@pytest.mark.parametrize("name", ["vLLM's chain", "chain", "tree", "again"])
def test_greedy_tokens_are_those_of_plain_vllm(name, answers):
    assert answers[name]["tokens"] == answers["plain"]["tokens"]


def test_a_chain_is_accepted_as_vllms_own_is(answers):
    ours, vllms = (answers[name]["counts"] for name in ("chain", "vLLM's chain"))
    assert all(ours[name] == vllms[name] for name in SPEC_DECODE)
    assert 0 < ours["accepted_tokens"] < ours["draft_tokens"]


def test_a_tree_accepts_as_much_as_a_chain(answers):
    tree, chain = answers["tree"]["counts"], answers["chain"]["counts"]
    assert tree["tokens_per_tree"] >= chain["tokens_per_tree"] > 1.2


def test_what_the_prefix_cache_keeps_the_layer_has_read(answers):
    again, first = answers["again"]["counts"], answers["tree"]["counts"]
    assert again["tokens_per_tree"] == first["tokens_per_tree"]


def test_sampled_requests_accept_drafts(answers):
    assert answers["sampled"]["counts"]["tokens_per_tree"] > 1.1
