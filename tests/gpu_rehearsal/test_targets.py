"""Kinds of targets and of drafters on vLLM's GPU engine: tokens are plain vLLM's, from its graphs.

Qwen3Next has Gated DeltaNet layers, GraniteMoeHybrid and NemotronH have Mamba2's, Lfm2 short
convolutions, DeepseekV3 latent attention, KimiLinear both this and Kimi Delta Attention. KimiK3 and
BailingMoeV3 have both in classes of their own, BailingMoeV2_5 has latents and linear attention.
DeepseekV32, GlmMoeDsa and HYV4 choose among latents. The second layer of the last two takes what
the first chose, and HYV4's heads have sinks. llama4's chunks end within prompts and within trees.
MiMoV2Flash has keys that are larger than values, and drafts with its own MTP layer. Others that do
so are in `test_mtp_layers.py`. In "lookup" no model drafts. Qwen2-VL and Qwen3.5 read images: a
draft that reads text drafts for the one, its MTP layer for the other, which has recurrent layers,
too.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.gpu.models import RECURRENT, pair_of, write_models
from sequoia_vllm.engine.common.patched import patched
from tests.support.architectures import save_architecture
from tests.support.engines import lookup_trees, sequoia, whole_trees
from tests.support.expert_layers import save_experts
from tests.support.generating import (
    generate_on,
    greedy_and_seeded,
    random_prompts,
    resumed,
    save_related_pair,
)
from tests.support.interpreted import call_on_gpu, gpu_environment
from tests.support.kimi import KINDS as WITH_STATES_AND_LATENTS
from tests.support.kimi import (
    rehearse_kimi_on_gpus,
    save_kimi_pair,
)
from tests.support.latents import (
    CHOOSES,
    ON_GPUS,
    SPARSE_KINDS,
    rehearse_on_gpus,
    save_latent_pair,
)
from tests.support.mamba import rehearse_as_on_gpus, save_mamba_pair
from tests.support.models import save_config, save_word_tokenizer
from tests.support.multimodal import IMAGE, call_with_images, requests_with_images, save_multimodal
from tests.support.recurrent import VOCABULARY, rehearse_in_float32, save_hybrid_pair
from tests.support.rehearsing import (
    check_replayed,
    generate,
    generate_with_trees,
    join_and_abort,
    plain_and_trees,
    rehearsing,
)
from tests.support.sparse import rehearse_hy4_on_gpus, rehearse_sparse_on_gpus

pytestmark = pytest.mark.engine

SHARDED = pytest.mark.sharded
LENGTHS = [5, 9, 20, 33, 14]
TOKENS, ABORTED, ENDS = 12, 1, 6
WITH_GRAMMAR = [2, 3]
MTP = {
    "method": "sequoia", "drafter": "mtp", "tree": {"size": 8, "depth": 3}, "adapt": False,
    "dynamic_tree": True,
}  # fmt: skip
MADE_UP = "the GPU program's, with made-up weights"
LATENT = ["DeepseekV3", *WITH_STATES_AND_LATENTS]
CHUNKS, DIFFKV = "llama4", "MiMoV2Flash"
SPARSE, SHARED_CHOICE, HY4 = SPARSE_KINDS
JOINED = [
    "Qwen3Next", "GraniteMoeHybrid", "NemotronH", "Lfm2", CHUNKS, DIFFKV, SPARSE, HY4, *LATENT,
]  # fmt: skip


def params() -> list[Any]:
    """Greedy and seeded in turn; two with a grammar of four words."""
    found = greedy_and_seeded(len(LENGTHS), TOKENS)
    for index in WITH_GRAMMAR:
        found[index].structured_outputs = StructuredOutputsParams(regex=f"(w[3-6]){{{TOKENS}}}")
    return found


def save_pair(folder: Path, name: str) -> tuple[str, str]:
    """Saves a target and a draft that is often right, and lets vLLM run them here.

    A target with an MTP layer is its own draft.
    """
    if name == DIFFKV:
        os.environ["VLLM_USE_FUSED_MOE_GROUPED_TOPK"] = "0"  # an operator of the GPU build
        return (save_experts(folder / "target", name, vocab=VOCABULARY),) * 2
    if name == "Qwen3Next":
        rehearse_in_float32()
        return save_hybrid_pair(folder, scale=0.1)
    if name == "DeepseekV3":
        rehearse_on_gpus()
        return save_latent_pair(folder)
    if name in SPARSE_KINDS:
        (rehearse_hy4_on_gpus if name == HY4 else rehearse_sparse_on_gpus)()
        return save_latent_pair(folder, kind=name)
    if name in WITH_STATES_AND_LATENTS:
        rehearse_kimi_on_gpus(name)
        return save_kimi_pair(folder, kind=name)
    if name == CHUNKS:
        target, draft = (save_architecture(folder / role, name) for role in ("target", "draft"))
        described = json.loads((draft / "config.json").read_text("utf-8"))
        save_config(draft, described | {"attention_chunk_size": None})
        return str(target), str(draft)
    rehearse_as_on_gpus()
    return save_mamba_pair(folder, name, scale=0.1)


def start_and_generate(folder: str, name: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees for batches of three and of one."""
    place, texts = Path(folder), random_prompts(LENGTHS[:3])
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    if name == "lookup":
        greedy.max_tokens = 2 * TOKENS
        return plain_and_trees(lookup_trees(size=8), save_related_pair(place)[0], texts, greedy)
    rehearse_in_float32()
    target, _ = write_models(pair_of(RECURRENT, tiny=True), place, tiny=True)
    return plain_and_trees(MTP, target, texts, greedy, load_format="dummy")


def start_and_join(folder: str, name: str) -> dict[str, Any]:
    """The same, and answers to requests as they come."""
    pair = save_pair(Path(folder), name)
    for path in pair:
        save_word_tokenizer(Path(path))
    # Some of sparse layers' requests have more tokens than they choose, one comes to have them.
    # Two requests come to have more than a chunk, or two.
    long = [0, CHOOSES - LENGTHS[1] - 6, 0, CHOOSES, 0]
    more = {SPARSE: long, HY4: long, CHUNKS: [22, 0, 40, 0, 0]}
    added = more.get(name, [0] * len(LENGTHS))
    lengths = [length + another for length, another in zip(LENGTHS, added, strict=True)]
    texts = random_prompts(lengths, VOCABULARY)
    options = {"model": pair[0], "skip_tokenizer_init": False}
    plain = ON_GPUS if name in LATENT else {}
    with rehearsing(None, **options, **plain) as llm:
        answers = {"plain": generate(llm, texts, params())}
    config = sequoia(8, 3, draft=pair[1], dynamic_tree=name in ("Qwen3Next", "DeepseekV3"))
    if name == DIFFKV:  # its window is shorter than what dynamic trees need
        config = {**MTP, "dynamic_tree": False}
    with rehearsing(config, as_users_start=True, **options) as llm:
        answers["trees"] = generate_with_trees(llm, texts[:3], params()[:3])
        answers["alone"] = generate_with_trees(llm, texts[:1], params()[:1])
        answers["joining"] = join_and_abort(llm, texts, params(), ABORTED)
    return answers


@pytest.fixture(
    scope="module",
    params=["lookup", *(pytest.param(name, marks=SHARDED) for name in [MADE_UP, *JOINED])],
)
def answers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    name, folder = request.param, tmp_path_factory.mktemp("targets")
    # The module of that target in vLLM needs what reads images.
    images = partial(call_with_images, environment=gpu_environment())
    call = images if name == MADE_UP else call_on_gpu
    function = start_and_join if name in JOINED else start_and_generate
    return {"name": name, **call(function, folder, folder=str(folder), name=name)}


@pytest.mark.parametrize("which", ["trees", "alone"])
def test_tokens_are_those_of_plain_vllm_and_nothing_leaves_its_graph(which, answers):
    check_replayed(answers[which], answers["plain"])


def test_drafts_are_accepted_and_requests_join_and_are_aborted(answers):
    """Some targets have requests that join; two of these follow grammars."""
    least = {"lookup": 1.05, MADE_UP: 0.9}.get(answers["name"], 1.2)
    assert answers["trees"]["counts"]["tokens_per_tree"] > least
    if answers["name"] not in JOINED:
        return
    plain, joining = answers["plain"]["tokens"], answers["joining"]
    assert joining["tokens"] == plain[:ABORTED] + plain[ABORTED + 1 :]
    assert joining["counts"]["tokens_per_tree"] > least
    assert joining["eager growth"] == []
    assert joining["modes"]["FULL"] > 0
    modes = [f"{mode} beside prompts" for mode in ("PIECEWISE", "FULL")]
    # Full graphs hold these steps only where our kernel has all rows.
    beside, never = modes[::-1] if answers["name"] in (CHUNKS, DIFFKV) else modes
    assert joining["modes"][beside] > 0
    assert never not in joining["modes"]
    assert all(set(plain[index][0]) <= {3, 4, 5, 6} for index in WITH_GRAMMAR)


def start_and_press(folder: str) -> dict[str, Any]:
    """Sparse layers: prompts in pieces, preemption; then requests whose beginnings are cached."""
    target, draft = save_pair(Path(folder), SHARED_CHOICE)
    texts, options = random_prompts([124, 150, 9], VOCABULARY), {"model": target}
    given = greedy_and_seeded(len(texts), 2 * TOKENS)
    with rehearsing(None, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, texts, given)}
    pressed = {"num_gpu_blocks_override": 7, "max_num_batched_tokens": 48}
    config = whole_trees(8, draft=draft, tree={"size": 8, "depth": 3}, dynamic_tree=True)
    with rehearsing(config, **pressed, **options) as llm:
        answers["pressed"] = generate_on(llm, texts, given)
    with rehearsing(config, **options) as llm:
        answers["cached"] = generate_on(llm, texts, given)
        answers["resumed"] = resumed(llm, texts, answers["cached"]["tokens"], ENDS)
    return answers


@pytest.mark.sharded
def test_sparse_layers_read_prompts_in_pieces_and_what_is_cached(tmp_path):
    found = call_on_gpu(start_and_press, tmp_path, folder=str(tmp_path))
    plain = found["plain"]["tokens"]
    assert found["pressed"]["tokens"] == found["cached"]["tokens"] == plain
    assert found["pressed"]["counts"]["preemptions"] > 0
    assert found["cached"]["counts"]["tokens_per_tree"] > 1.2
    assert found["resumed"]["tokens"] == [[one[0][-ENDS:]] for one in plain[::2]]
    assert found["resumed"]["hits"] >= CHOOSES


def start_and_read(folder: str, name: str) -> dict[str, Any]:
    """Answers to text alone, to an image, and to two."""
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    paths = save_multimodal(Path(folder), name)
    config = sequoia(size=8, depth=3, draft=paths.get("draft", paths["target"]))
    if name == "qwen3_5":
        rehearse_in_float32()
        config["drafter"] = "mtp"
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    # FlashAttention's, a library of the GPU build, turns the encoder's queries.
    with patched(ApplyRotaryEmb, "forward_cuda", ApplyRotaryEmb.forward_native):
        return plain_and_trees(
            config, paths["target"], requests_with_images(IMAGE[name])[:3], greedy,
            tokenizer=paths.get("tokenizer", paths["target"]), skip_tokenizer_init=False,
            limit_mm_per_prompt={"image": 2, "video": 0}, mm_encoder_attn_backend="TORCH_SDPA",
        )  # fmt: skip


@pytest.mark.sharded
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
def test_images(name, tmp_path):
    given = {"folder": str(tmp_path), "name": name}
    found = call_with_images(start_and_read, tmp_path, gpu_environment(), **given)
    trees = found["trees"]
    assert trees["tokens"] == found["plain"]["tokens"]
    assert trees["counts"]["tokens_per_tree"] > 1.5
    assert min(trees["graphs"][kind] for kind in ("TreeGraphManager", "DraftGraphs")) > 1
    assert trees["eager growth"] == []
