"""Multimodal targets, with M-RoPE and without, and drafts that read text, or none: tokens are
plain vLLM's.

Qwen3.5 has recurrent layers, which need V2 with the attention of GPUs, and its own layer drafts.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreted import v2_environment
from tests.support.multimodal import (
    IMAGE,
    answer_beside_others,
    answer_images,
    answer_one_by_one,
    answer_with_a_head,
    answer_with_its_layer,
    call_with_images,
    save_multimodal,
)
from tests.support.recurrent import run_in_float32

HYBRID = "qwen3_5"
pytestmark = [pytest.mark.engine, pytest.mark.slow]
EACH = [
    pytest.param(name, marks=[] if name == "qwen2_vl" else pytest.mark.sharded)
    for name in (*IMAGE, "qwen2_vl on V2")
]
# The prompt of two images comes in three pieces, which end within them.
IN_PIECES = {"max_num_batched_tokens": 12, "enable_chunked_prefill": True}


def answer_all(folder: str, name: str) -> dict[str, Any]:
    if name == HYBRID:
        run_in_float32()
    paths = save_multimodal(Path(folder), name)
    given = {"paths": paths, "image": IMAGE[name]}
    text = {"language_model_only": True, "limit_mm_per_prompt": {}}
    return {
        "name": name,
        "plain": answer_images(**given, trees=False, options={}),
        "text alone": answer_images(**given, trees=True, options=text),
        "trees": answer_images(**given, trees=True, options={}),
        "lookup": answer_images(**given, trees="lookup", options={}),
        "in pieces": answer_images(
            **given, trees=True, options={} if name == "gemma3" else IN_PIECES
        ),
        # Gemma's images have four tokens, and are read whole.
        "one by one": None if name == "gemma3" else {
            how: answer_one_by_one(**given, trees=does)
            for how, does in (("plain", False), ("trees", True))
        },
    }  # fmt: skip


@pytest.fixture(scope="module", params=EACH)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name, _, on_v2 = request.param.partition(" on ")
    folder = tmp_path_factory.mktemp(name)
    on_gpus = name == HYBRID
    environment = v2_environment(gpu_attention=on_gpus) if on_v2 or on_gpus else None
    return call_with_images(answer_all, folder, environment, folder=str(folder), name=name)


@pytest.mark.parametrize("which", ["trees", "lookup", "in pieces"])
def test_tokens_are_those_of_plain_vllm(which, answers):
    """Greedy, again from the prefix cache, and seeded; with no, one and two images."""
    assert answers[which]["tokens"] == answers["plain"]["tokens"]


def test_a_server_of_text_alone(answers):
    """``--language-model-only``: vLLM leaves out what reads images."""
    plain = [[texts[0]] for texts in answers["plain"]["tokens"]]
    assert answers["text alone"]["tokens"] == plain
    assert answers["text alone"]["accepted_tokens"] > answers["text alone"]["drafts"] / 2


def test_drafts_are_accepted_and_images_found_in_the_cache(answers):
    """Keys of accepted nodes have the positions of their depths, or later tokens would differ.

    For layers that read states, vLLM's cache gives a block less, which is all of these prompts.
    """
    trees, plain = answers["trees"], answers["plain"]["hits"]
    assert trees["accepted_tokens"] > trees["drafts"] / 2
    assert plain > 0
    assert trees["hits"] == (0 if answers["name"] == HYBRID else plain)


def test_images_side_by_side_where_one_is_kept_at_a_time(answers):
    """vllm-ascend#17195 and vllm#54498: no request waits for ever, and positions are M-RoPE's."""
    if answers["name"] == "gemma3":
        assert answers["one by one"] is None
        return
    plain, trees = (answers["one by one"][how] for how in ("plain", "trees"))
    assert trees["kept"] == 16 < plain["kept"]
    assert trees["tokens"] == plain["tokens"]
    assert trees["accepted"] > 5


def test_what_followed_before_is_drafted_beside_images(answers):
    """Without a draft, by the text around them."""
    assert answers["lookup"]["accepted_tokens"] > 5


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("name", "on_v2"), [("qwen2_vl", False), ("qwen3_vl", False), ("qwen2_vl", True)]
)
def test_adapters_a_grammar_and_an_abort_beside_images(name, on_v2, tmp_path):
    plain, trees = (
        call_with_images(
            answer_beside_others, made, v2_environment() if on_v2 else None,
            folder=str(made), name=name, trees=does,
        )
        for does, made in [(False, tmp_path / "plain"), (True, tmp_path / "trees")]
        if made.mkdir() is None
    )  # fmt: skip
    assert trees["tokens"] == plain["tokens"]
    assert plain["without adapters"] != plain["tokens"][0]
    assert trees["accepted"] > 5  # the draft has no adapter


@pytest.mark.sharded
def test_a_head_reads_of_an_image_what_vllms_chain_gives_it(tmp_path):
    """Its tokens, and states: vLLM's EAGLE-3 classes take no embeddings of images."""
    found = call_with_images(answer_with_a_head, tmp_path, v2_environment(), folder=str(tmp_path))
    assert found["chain"] == found["vLLM's chain"]
    assert found["chain"]["counts"]["accepted_tokens"] > 5
    assert found["tree"]["tokens"] == found["chain"]["tokens"] == found["plain"]["tokens"]


@pytest.mark.sharded
def test_qwen3_5s_layer_reads_images_as_in_vllms_chain(tmp_path):
    """vLLM gives it their embeddings, and it would draft worse without them."""
    environment = v2_environment(gpu_attention=True)
    found = call_with_images(answer_with_its_layer, tmp_path, environment, folder=str(tmp_path))
    ours, vllms, blind = (found[name] for name in ("ours", "vLLM's", "blind"))
    assert ours["counts"] == vllms["counts"]
    assert ours["counts"]["accepted_tokens"] > 5
    assert blind["counts"] != ours["counts"]
    assert ours["tokens"] == vllms["tokens"] == blind["tokens"]
