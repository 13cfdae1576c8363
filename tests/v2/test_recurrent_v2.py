"""Trees over recurrent layers and latent attention with what GPUs have, in float32.

The targets are Qwen3Next (Gated DeltaNet), KimiLinear, KimiK3 and BailingMoeV3 (Kimi Delta
Attention and latent attention), BailingMoeV2_5 (linear attention and latent attention),
GraniteMoeHybrid, NemotronH and FalconH1 (Mamba2), Lfm2 (short convolutions) and DeepseekV3 (latent
attention). Plain tokens are those of vLLM's own engine, with its code for GPUs, but for Mamba2's
decoding. Prompts of layers with states are read by a recurrence of ours in both
(`tests.support.recurrent.run_in_float32`, `tests.support.kimi.run_kimi_as_on_gpus`,
`tests.support.mamba.run_as_on_gpus`), but for linear attention's, and those of latent attention by
the CPU's code.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.calling import called_once
from tests.support.engines import runner_of, running, whole_trees
from tests.support.generating import (
    completions,
    describe,
    generate,
    generate_on,
    greedy_and_seeded,
    random_prompts,
    resumed,
)
from tests.support.interpreted import call_on_v2
from tests.support.kimi import K3, KIMI, LINEAR, LING, run_kimi_as_on_gpus, save_kimi_pair
from tests.support.latents import save_latent_pair
from tests.support.mamba import run_as_on_gpus, save_mamba_pair
from tests.support.recurrent import VOCABULARY, run_in_float32, save_hybrid_pair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS = {"skip_tokenizer_init": True, "block_size": 16, "enable_prefix_caching": False}
LENGTHS = [9, 40, 23, 70]
TOKENS, ENDS = 30, 6
SIZE, LARGE = 8, 64
LATENTS, WITH_LATENTS = "DeepseekV3", (KIMI, K3, LINEAR, LING)
# Layers with states, and what a node leaves in each, in numbers: inputs of 96 channels, a key (or
# B) of 16, and two heads' updates of 32 and decays; of convolutions inputs alone.
LAYERS = {"FalconH1": 3}
# Nodes of Kimi Delta Attention leave two keys, updates and decays of 16. Products that their two
# layers share take 160 in each of two heads. Ling 2.5's leave two keys and updates of 64, and
# decays.
LEFT = {"Lfm2": 64, **dict.fromkeys((KIMI, K3, LING), 96 + 3 * 32 + 160), LINEAR: 4 * 64 + 2}
# Beside latents and states vLLM's blocks have 128 tokens.
LONGER = dict.fromkeys(WITH_LATENTS, 96)
RUN = {
    "Qwen3Next": "GdnTreeLayer", "FalconH1": "TritonTreeImpl", "Lfm2": "ConvTreeLayer",
    KIMI: "KdaTreeLayer", K3: "K3TreeLayer", LINEAR: "LinearTreeLayer", LING: "BailingKdaTreeLayer",
    LATENTS: "MLATreeImpl",
}  # fmt: skip
# `tests/kernels` has the trees of Mamba2's and convolutions' states in every run.
MAMBAS = ("GraniteMoeHybrid", "Lfm2", "NemotronH", "FalconH1")


def params(tokens: int = TOKENS) -> list[Any]:
    """Greedy and seeded in turn; the third has no drafts: each of its tokens takes a step."""
    found = greedy_and_seeded(len(LENGTHS), [tokens, tokens, min(tokens, TOKENS // 2), tokens])
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
    return found | ({"nodes": backend._states.kept.size_in_bytes} if backend and states else {})


def save_pair(models: str, name: str) -> tuple[str, str]:
    """Saves a target and a draft that is often right, and lets vLLM run them here."""
    if name == LATENTS:
        return save_latent_pair(Path(models))
    if name in WITH_LATENTS:
        run_kimi_as_on_gpus()
        return save_kimi_pair(Path(models), kind=name)
    if name != "Qwen3Next":
        run_as_on_gpus()
        return save_mamba_pair(Path(models), name)
    run_in_float32()
    return save_hybrid_pair(Path(models), scale=0.25)


def generate_all(models: str, name: str) -> dict[str, Any]:
    target, draft = save_pair(models, name)
    lengths = [length + LONGER.get(name, 0) for length in LENGTHS]
    prompts, options = random_prompts(lengths, VOCABULARY), {"model": target, **OPTIONS}
    answers: dict[str, Any] = {"name": name}
    with running(None, **options) as llm:
        outputs = llm.generate(prompts, params(), use_tqdm=False)
        tokens = completions(outputs)
        answers["plain"] = {"tokens": tokens, "states": states_of(llm), **describe(llm)}
    blocks = 14 if name == LATENTS else 12
    pressed = {
        "num_gpu_blocks_override": blocks, "max_num_batched_tokens": 48,
        "max_model_len": lengths[-1] + TOKENS,  # no room for trees at the last one's end
    }  # fmt: skip
    with running(whole_trees(SIZE, draft=draft), **pressed, **options) as llm:
        answers["pressed"] = {**generate_on(llm, prompts, params()), "states": states_of(llm)}
    cached = {**options, "enable_prefix_caching": True}
    with running(whole_trees(SIZE, draft=draft), **cached) as llm:
        answers["cached"] = generate_on(llm, prompts, params())
        again = [resumed(llm, prompts, answers["cached"]["tokens"], ENDS) for _ in range(2)]
        answers["resumed"], answers["resumed again"] = again
    return answers


def generate_large(models: str) -> dict[str, Any]:
    target, draft = save_pair(models, "Qwen3Next")
    given = random_prompts(LENGTHS, VOCABULARY)[:2], params()[:2]
    options = {"model": target, **OPTIONS}
    trees = whole_trees(LARGE, draft=draft, tree={"size": LARGE, "depth": 9})
    return {
        "plain": generate(None, *given, **options), "trees": generate(trees, *given, **options),
    }  # fmt: skip


def generate_whole(models: str) -> dict[str, Any]:
    """The same where vLLM keeps whole keys and values, in layers of ordinary attention."""
    os.environ["VLLM_MLA_DISABLE"] = "1"
    target, draft = save_latent_pair(Path(models))
    given = random_prompts(LENGTHS, VOCABULARY), params(20)
    options = {"model": target, "skip_tokenizer_init": True, "block_size": 16}
    trees = generate(whole_trees(SIZE, draft=draft), *given, **options)
    return {"plain": generate(None, *given, **options), "trees": trees}


OTHERS = [*WITH_LATENTS, LATENTS, *MAMBAS]
KINDS = ["Qwen3Next", *(pytest.param(name, marks=pytest.mark.sharded) for name in OTHERS)]
answers = called_once(call_on_v2, generate_all, ("name", KINDS), gpu_attention=True)


@pytest.mark.parametrize("case", ["pressed", "cached"])
def test_tokens_are_those_of_plain_vllm(case, answers):
    """Beside a request without drafts, which vLLM's own code decodes in the same steps."""
    found = answers[case]
    assert found["tokens"] == answers["plain"]["tokens"]
    # Random models: how many are accepted depends on the processor's rounding (19 were seen).
    assert found["counts"]["accepted_tokens"] > 15


@pytest.mark.sharded  # `tests/kernels` has trees as large each time
@pytest.mark.parametrize("function", [generate_large, generate_whole])
def test_the_largest_trees_and_whole_keys_and_values(function, tmp_path):
    found = call_on_v2(function, tmp_path, gpu_attention=True, models=str(tmp_path))
    assert found["trees"]["tokens"] == found["plain"]["tokens"]
    assert found["trees"]["counts"]["accepted_tokens"] > 20
    assert found["trees"]["attention"] != "MLATreeImpl"


def test_trees_are_accepted_and_rejected(answers):
    assert answers["cached"]["attention"] == RUN.get(answers["name"], "MambaTreeLayer")
    assert (answers["plain"]["attention"] == "TritonMLAImpl") is (answers["name"] == LATENTS)
    assert 1.2 < answers["cached"]["counts"]["tokens_per_tree"] < 3
    assert answers["pressed"]["counts"]["preemptions"] > 0


@pytest.mark.parametrize("case", ["resumed", "resumed again"])
def test_cached_states_are_right(case, answers):
    """vLLM's own engine has no hits at first either: it caches few states of decoding requests."""
    expected = [[one[0][-ENDS:]] for one in answers["plain"]["tokens"][::2]]
    assert answers[case]["tokens"] == expected
    if case == "resumed again":
        assert answers[case]["hits"] > 0
    elif answers["name"] == "Qwen3Next":
        assert answers[case]["hits"] == 0


def test_a_request_holds_plains_states_and_what_its_nodes_leave(answers):
    states, plain = answers["pressed"]["states"], answers["plain"]["states"]
    nodes = states.pop("nodes", 0)
    assert states == plain
    each = LEFT.get(answers["name"], 96 + 16 + 2 * 32 + 2)
    left = 4 * LAYERS.get(answers["name"], 2) * each
    assert nodes % left == 0
    assert (nodes // left >= SIZE) is (answers["name"] != LATENTS)
