"""Targets that read images, with M-RoPE, on vLLM's GPU engine: tokens as plain, from graphs.

Qwen2-VL has a draft that reads text. Qwen3.5 has recurrent layers, and its own MTP layer drafts.
"""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

from sequoia_vllm.engine.common.patched import patched
from tests.support.engines import sequoia
from tests.support.multimodal import (
    IMAGE,
    call_with_images,
    requests_with_images,
    save_multimodal,
)
from tests.support.recurrent import rehearse_in_float32
from tests.support.rehearsing import generate, generate_with_trees, rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]


def start_and_read(folder: str, name: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees: to text alone, an image, two images."""
    paths = save_multimodal(Path(folder), name)
    config = sequoia(size=8, depth=3, draft=paths.get("draft", paths["target"]))
    if name == "qwen3_5":
        rehearse_in_float32()
        config["drafter"] = "mtp"
    requests = requests_with_images(IMAGE[name])[:3]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    options = {
        "model": paths["target"], "tokenizer": paths.get("tokenizer", paths["target"]),
        "limit_mm_per_prompt": {"image": 2, "video": 0},
        "skip_tokenizer_init": False, "mm_encoder_attn_backend": "TORCH_SDPA",
    }  # fmt: skip
    # FlashAttention's, a library of the GPU build, turns the encoder's queries.
    with patched(ApplyRotaryEmb, "forward_cuda", ApplyRotaryEmb.forward_native):
        with rehearsing(None, **options) as llm:
            plain = generate(llm, requests, params)
        with rehearsing(config, **options) as llm:
            return {"plain": plain, "trees": generate_with_trees(llm, requests, params)}


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_5"])
def answers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, name = tmp_path_factory.mktemp("images"), request.param
    return call_with_images(start_and_read, folder, on_gpu=True, folder=str(folder), name=name)


def test_tokens_are_those_of_plain_vllm(answers):
    assert answers["trees"]["tokens"] == answers["plain"]["tokens"]
    assert answers["trees"]["counts"]["tokens_per_tree"] > 1.5


def test_trees_are_grown_and_scored_by_graphs(answers):
    trees = answers["trees"]
    assert trees["graphs"]["TreeGraphManager"] > 1
    assert trees["graphs"]["DraftGraphs"] > 1
    assert trees["eager growth"] == []
