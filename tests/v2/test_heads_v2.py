"""Trees drafted by a trained EAGLE-3 head: tokens as plain V2's, drafts as in vLLM's own chain.

The embedded target with its embedded head, in one process.
"""

from typing import Any

import pytest

from sequoia_vllm.engine.request_options import MOST_DRAFTS
from tests.support.engines import metric, running, sequoia, whole_trees
from tests.support.generating import (
    SPEC_DECODE,
    completions,
    generate,
    generate_on,
    generate_with_trees,
)
from tests.support.heads import EAGLE3
from tests.support.models import prompts
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DEPTH, TOKENS = 4, 24


def greedy(count: int) -> list[Any]:
    from vllm import SamplingParams

    return [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)] * count


def mixed() -> list[Any]:
    """Greedy, with seeds and truncations, without drafts, with a capped tree, ending early."""
    from vllm import SamplingParams

    common = {"max_tokens": 16, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=3, **common),
        SamplingParams(temperature=0, **common, extra_args={MOST_DRAFTS: 0}),
        SamplingParams(temperature=0.7, seed=5, top_p=0.9, **common),
        SamplingParams(temperature=0, **common, extra_args={MOST_DRAFTS: 2}),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, repetition_penalty=1.3, **common),
    ]


def chain_of_vllm(texts: list[str], params: list[Any]) -> dict[str, Any]:
    """Tokens and counters of vLLM's own speculation with the same head."""
    config = {"method": "eagle3", "model": EAGLE3, "num_speculative_tokens": DEPTH}
    with running(config) as llm:
        outputs = llm.generate(texts, params, use_tqdm=False)
        counts = {name: metric(llm, f"vllm:spec_decode_num_{name}") for name in SPEC_DECODE}
        return {"tokens": completions(outputs), "counts": counts}


def generate_twice(texts: list[str], params: list[Any]) -> list[dict[str, Any]]:
    """From a cache that is empty, and then has the prompts."""
    with running(whole_trees(size=12, depth=DEPTH, draft=EAGLE3)) as llm:
        return [generate_on(llm, texts, params) for _ in range(2)]


def generate_all() -> dict[str, Any]:
    texts, params = prompts(3), greedy(3)
    answers: dict[str, Any] = {
        "plain": generate(None, texts, params),
        "vLLM's chain": chain_of_vllm(texts, params),
        "chain": generate_with_trees(EAGLE3, texts, params, size=DEPTH + 1, depth=DEPTH),
        "synchronous": generate_with_trees(
            EAGLE3, texts, params, size=12, depth=DEPTH, async_scheduling=False
        ),
        "twice": generate_twice(texts, params),
    }
    # Whole trees at batches of one and two, none of three: the head reads all the same.
    steps = {"num_speculative_tokens_per_batch_size": [[1, 1, 11], [2, 2, 3], [3, 8, 0]]}
    lengths = [*params[:1], *(param.clone() for param in params[1:])]
    for index, param in enumerate(lengths):
        param.max_tokens = TOKENS - 8 * index
    with running(sequoia(size=12, depth=DEPTH, draft=EAGLE3, **steps)) as llm:
        answers["tiers"] = generate_on(llm, texts, lengths)
    answers["special plain"] = generate(None, prompts(len(mixed())), mixed())
    answers["special"] = generate_with_trees(
        EAGLE3, prompts(len(mixed())), mixed(), max_num_batched_tokens=64
    )
    # Room for two requests and a half.
    small = {"kv_cache_memory_bytes": 4 << 20, "block_size": 32, "max_model_len": 256}
    answers["preempted"] = generate_with_trees(EAGLE3, texts, params, size=12, depth=DEPTH, **small)
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return call_on_v2(generate_all, tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize("name", ["vLLM's chain", "chain", "synchronous", "preempted"])
def test_greedy_tokens_are_those_of_plain_vllm(name, answers):
    assert answers[name]["tokens"] == answers["plain"]["tokens"]


def test_a_chain_is_accepted_as_vllms_own_is(answers):
    """The same drafts from the same states, token for token: as many steps, as much accepted."""
    ours, vllms = answers["chain"]["counts"], answers["vLLM's chain"]["counts"]
    assert {name: ours[name] for name in SPEC_DECODE} == vllms
    assert ours["accepted_tokens"] > 20


def test_a_tree_accepts_more_than_a_chain(answers):
    tree, chain = answers["synchronous"]["counts"], answers["chain"]["counts"]
    assert tree["tokens_per_tree"] > 1.1 * chain["tokens_per_tree"]


def test_what_the_prefix_cache_keeps_the_head_has_read(answers):
    """Of the last block it has not, as that comes with a later token: vLLM computes it anew."""
    first, second = answers["twice"]
    assert first["tokens"] == second["tokens"] == answers["plain"]["tokens"]
    assert first["counts"]["tokens_per_tree"] == second["counts"]["tokens_per_tree"]


def test_the_head_reads_while_nothing_is_drafted(answers):
    tiers, plain = answers["tiers"], answers["plain"]["tokens"]
    assert [tokens for [tokens] in tiers["tokens"]] == [
        tokens[: len(found)] for [tokens], [found] in zip(plain, tiers["tokens"], strict=True)
    ]
    assert tiers["counts"]["tokens_per_tree"] > 1.3


def test_requests_of_every_kind(answers):
    """Prompts come in chunks, beside trees."""
    assert answers["special"]["tokens"] == answers["special plain"]["tokens"]
    assert answers["special"]["counts"]["tokens_per_tree"] > 1.2


def test_requests_are_preempted(answers):
    assert answers["preempted"]["counts"]["preemptions"] > 0
