"""Trees over Gated DeltaNet layers (`Qwen3NextForCausalLM`) with what GPUs have, in float32.

Plain tokens are those of vLLM's own engine, with its code for GPUs. Prompts are read by a
recurrence of ours in both (`tests.support.recurrent.run_in_float32`).
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import metric, runner_of, running, whole_trees
from tests.support.generating import (
    completions,
    generate,
    generate_on,
    greedy_and_seeded,
    random_prompts,
)
from tests.support.on_v2 import call_on_v2
from tests.support.recurrent import VOCABULARY, run_in_float32, save_hybrid_pair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS = {"skip_tokenizer_init": True, "block_size": 16, "enable_prefix_caching": False}
LENGTHS = [9, 40, 23, 70]
TOKENS, ENDS = 30, 6
SIZE, LARGE = 8, 64


def params(tokens: int = TOKENS) -> list[Any]:
    """Greedy and seeded in turn; the third is never drafted for."""
    found = greedy_and_seeded(len(LENGTHS), tokens)
    found[2].extra_args = {"sequoia_max_drafts": 0}
    return found


def states_of(llm: Any) -> dict[str, Any]:
    """What a request holds in a recurrent layer: bytes, shapes; memory of all layers' nodes."""
    from vllm.v1.kv_cache_interface import MambaSpec

    runner = runner_of(llm)
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    config = runner.vllm_config
    kinds = {(spec.shapes, spec.max_memory_usage_bytes(config)) for spec in states}
    found = {"kinds": sorted(kinds), "tokens of a block": config.cache_config.block_size}
    backend = getattr(runner, "tree_backend", None)
    return found | ({"nodes": backend._states.kept.size_in_bytes} if backend else {})


def generate_all(models: str) -> dict[str, Any]:
    """Answers of plain vLLM and of trees."""
    run_in_float32()
    target, draft = save_hybrid_pair(Path(models), scale=0.25)
    prompts, options = random_prompts(LENGTHS, VOCABULARY), {"model": target, **OPTIONS}
    answers: dict[str, Any] = {}
    with running(None, **options) as llm:
        outputs = llm.generate(prompts, params(), use_tqdm=False)
        answers["plain"] = {"tokens": completions(outputs), "states": states_of(llm)}
    with running(whole_trees(SIZE, draft=draft), **options) as llm:
        answers["trees"] = {**generate_on(llm, prompts, params()), "states": states_of(llm)}
    cached = {**options, "enable_prefix_caching": True}
    with running(whole_trees(SIZE, draft=draft), **cached) as llm:
        answers["cached"] = generate_on(llm, prompts, params())
        again = [resumed(llm, prompts, answers["cached"]["tokens"]) for _ in range(2)]
        answers["resumed"], answers["resumed again"] = again
    answers["pressed"] = generate(
        whole_trees(SIZE, draft=draft), prompts, params(), num_gpu_blocks_override=12,
        max_model_len=128, max_num_batched_tokens=48, **options,
    )  # fmt: skip
    return answers


def generate_large(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of the largest trees."""
    run_in_float32()
    target, draft = save_hybrid_pair(Path(models), scale=0.25)
    given = random_prompts(LENGTHS, VOCABULARY)[:2], params()[:2]
    options = {"model": target, **OPTIONS}
    trees = whole_trees(LARGE, draft=draft, tree={"size": LARGE, "depth": 9})
    return {
        "plain": generate(None, *given, **options), "trees": generate(trees, *given, **options),
    }  # fmt: skip


def resumed(llm: Any, prompts: list[Any], tokens: list[Any]) -> dict[str, Any]:
    """The last tokens of greedy requests again, behind all that came before them."""
    halves = [
        {"prompt_token_ids": prompt["prompt_token_ids"] + first[:-ENDS]}
        for prompt, [first] in zip(prompts, tokens, strict=True)
    ]
    before = metric(llm, "vllm:prefix_cache_hits")
    outputs = llm.generate(halves[::2], params(ENDS)[::2], use_tqdm=False)
    hits = metric(llm, "vllm:prefix_cache_hits") - before
    return {"tokens": completions(outputs), "hits": hits}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("recurrent")
    return call_on_v2(generate_all, directory, gpu_attention=True, models=str(directory))


@pytest.mark.parametrize("case", ["trees", "cached", "pressed"])
def test_tokens_are_those_of_plain_vllm(case, answers):
    """Beside a request without drafts, which vLLM's own code decodes in the same steps."""
    found = answers[case]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert found["counts"]["accepted_tokens"] > 20


@pytest.mark.nightly  # `tests/kernels` has trees as large each time
def test_tokens_of_the_largest_trees_are_those_of_plain_vllm(tmp_path):
    found = call_on_v2(generate_large, tmp_path, gpu_attention=True, models=str(tmp_path))
    assert found["trees"]["tokens"] == found["plain"]["tokens"]
    assert found["trees"]["counts"]["accepted_tokens"] > 20


def test_trees_are_accepted_and_rejected(answers):
    assert answers["trees"]["attention"] == "GdnTreeLayer"
    assert 1.3 < answers["trees"]["counts"]["tokens_per_tree"] < 3
    assert answers["pressed"]["counts"]["preemptions"] > 0


@pytest.mark.parametrize("case", ["resumed", "resumed again"])
def test_cached_states_are_right(case, answers):
    """vLLM's own engine has no hits at first either: it caches few states of decoding requests."""
    expected = [[one[0][-ENDS:]] for one in answers["plain"]["tokens"][::2]]
    assert answers[case]["tokens"] == expected
    assert (answers[case]["hits"] > 0) == (case == "resumed again")


def test_a_request_holds_plains_states_and_what_its_nodes_leave(answers):
    states, plain = answers["trees"]["states"], answers["plain"]["states"]
    nodes = states.pop("nodes")
    assert states == plain
    # Of two layers: inputs of 96 channels, a key of 16, and two heads' updates of 32 and decays.
    assert nodes % (2 * 4 * (96 + 16 + 2 * 32 + 2)) == 0
    assert nodes // (2 * 4 * (96 + 16 + 2 * 32 + 2)) >= SIZE
