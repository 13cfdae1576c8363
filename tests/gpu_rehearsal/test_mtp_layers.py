"""Targets' own MTP layers draft on vLLM's GPU engine: tokens are plain vLLM's, from its graphs.

MiMo's and Qwen3Next's layers have keys and values, NemotronH's has experts behind these, and the
others have latents. LongcatFlash's target has experts without weights. Layers of DeepseekV32 and
GlmMoeDsa would choose among latents, and draft without their choice. `test_targets.py` has
MiMoV2Flash's layer, and Qwen3.5's, which reads images.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config.speculative import SpeculativeConfig

from tests.support.engines import chain_of
from tests.support.expert_layers import save_experts
from tests.support.generating import random_prompts, speculated
from tests.support.heads import save_mimo
from tests.support.interpreted import call_on_gpu, gpu_environment
from tests.support.kimi import K3, LINEAR, LING, rehearse_kimi_on_gpus, save_ling_layer
from tests.support.latents import (
    CHOOSES,
    LONGCAT,
    ON_GPUS,
    SPARSE_KINDS,
    rehearse_on_gpus,
    save_latent_layer,
    save_longcat_layer,
)
from tests.support.mamba import rehearse_as_on_gpus, save_nemotron_layer
from tests.support.multimodal import call_with_images, save_glm_ocr
from tests.support.recurrent import rehearse_in_float32
from tests.support.rehearsing import check_replayed, generate, plain_and_trees, rehearsing
from tests.support.sparse import rehearse_hy4_on_gpus, rehearse_sparse_on_gpus

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

VOCABULARY, LENGTHS, TOKENS = 256, [5, 9, 20], 12
TREES = {
    "method": "sequoia", "drafter": "mtp", "tree": {"size": 8, "depth": 3}, "adapt": False,
    "dynamic_tree": True,
}  # fmt: skip
# Compiled, vLLM asks for what LongCat's experts without weights give before they ran.
NOT_COMPILED = {"compilation_config": {"mode": 0}}
SPARSE, SHARED_CHOICE, HY4 = SPARSE_KINDS
GLM_OCR = "GlmOcr"
read_as_draft = SpeculativeConfig.hf_config_override


def as_k3(hf_config: Any, **options: Any) -> Any:
    """How vLLM reads Kimi K3's MTP layer; the tiny target is its text model alone."""
    hf_config.model_type = "kimi_k3"
    return read_as_draft(hf_config, **options)


def rehearse_k3_on_gpus() -> None:
    rehearse_kimi_on_gpus(K3)
    SpeculativeConfig.hf_config_override = staticmethod(as_k3)


# By kind: what lets vLLM run it here, what saves it, and the engines' options.
LAYERS: dict[str, tuple[Callable[[], None], Callable[[Path], str], dict[str, Any]]] = {
    "MiMo": (lambda: None, lambda place: save_mimo(place / "target"), {}),
    "Qwen3Next": (
        rehearse_in_float32, lambda place: save_experts(place / "target", "Qwen3Next"), {}
    ),
    GLM_OCR: (
        lambda: None, lambda place: save_glm_ocr(place / "target", VOCABULARY),
        {"language_model_only": True},
    ),
    "NemotronH": (rehearse_as_on_gpus, partial(save_nemotron_layer, vocab=VOCABULARY), {}),
    "DeepseekV3": (rehearse_on_gpus, partial(save_latent_layer, vocab=VOCABULARY), ON_GPUS),
    LONGCAT: (
        rehearse_on_gpus, partial(save_longcat_layer, vocab=VOCABULARY),
        {**ON_GPUS, **NOT_COMPILED},
    ),
    **{
        kind: (
            rehearse_k3_on_gpus if kind == K3 else partial(rehearse_kimi_on_gpus, kind),
            partial(save_ling_layer, vocab=VOCABULARY, kind=kind), ON_GPUS,
        )
        for kind in (LINEAR, LING, K3)
    },
    **{
        kind: (
            rehearse_hy4_on_gpus if kind == HY4 else rehearse_sparse_on_gpus,
            partial(save_latent_layer, vocab=VOCABULARY, kind=kind),
            {} if kind == SPARSE else {"attention_config": {"backend": "FLASHMLA_SPARSE"}},
        )
        for kind in SPARSE_KINDS
    },
}  # fmt: skip


def greedy(tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def start_and_generate(folder: str, kind: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees for batches of three and of one."""
    prepare, save, options = LAYERS[kind]
    prepare()
    more = CHOOSES if kind in SPARSE_KINDS else 0
    texts = random_prompts([length + more for length in LENGTHS])
    return plain_and_trees(TREES, save(Path(folder)), texts, greedy(), **options)


@pytest.mark.parametrize("kind", LAYERS)
def test_tokens_are_those_of_plain_vllm_and_drafts_are_accepted(kind, tmp_path):
    # The module of that target in vLLM needs what reads images.
    images = partial(call_with_images, environment=gpu_environment())
    call = images if kind == GLM_OCR else call_on_gpu
    found = call(start_and_generate, tmp_path, folder=str(tmp_path), kind=kind)
    for which in ("trees", "alone"):
        check_replayed(found[which], found["plain"])
    assert found["trees"]["counts"]["tokens_per_tree"] > 1.2


def start_and_compare(folder: str, kind: str) -> dict[str, Any]:
    """Drafts by a sparse layer in texts shorter, and longer, than what it chooses."""
    prepare, save, _ = LAYERS[kind]
    prepare()
    target = save(Path(folder))
    vllms = {"method": "mtp", "num_speculative_tokens": 3}
    short, long = random_prompts([9, 20]), random_prompts([9 + CHOOSES, 20 + CHOOSES])
    found = {}
    for name, config in ("vLLM's", vllms), ("ours", chain_of(target, 3, drafter="mtp")):
        with rehearsing(config, model=target) as llm:
            tokens = generate(llm, short, greedy(2 * TOKENS))["tokens"]
            counts = speculated(llm)
            tokens += generate(llm, long, greedy(2 * TOKENS))["tokens"]
            found[name] = {"tokens": tokens, "short": counts, "all": speculated(llm)}
    return found


@pytest.mark.parametrize("kind", [SPARSE, HY4])
def test_a_sparse_layer_drafts_without_its_choice(kind, tmp_path):
    """What it drafts differs only in texts that are longer than what it would choose."""
    found = call_on_gpu(start_and_compare, tmp_path, folder=str(tmp_path), kind=kind)
    ours, vllms = found["ours"], found["vLLM's"]
    assert ours["tokens"] == vllms["tokens"]
    assert ours["short"] == vllms["short"]
    accepted = "accepted_tokens"
    assert 0 < ours["short"][accepted] < ours["all"][accepted]
