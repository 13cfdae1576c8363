"""Trees drafted by a target's own MTP layer on vLLM's GPU engine: started, captured, replayed."""

from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.gpu.models import RECURRENT, pair_of, write_models
from tests.support.expert_layers import save_experts
from tests.support.generating import random_prompts
from tests.support.heads import save_mimo
from tests.support.multimodal import call_with_images
from tests.support.on_gpu import call_on_gpu
from tests.support.recurrent import rehearse_in_float32
from tests.support.rehearsing import check_replayed, plain_and_trees

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TREES = {
    "method": "sequoia", "drafter": "mtp", "tree": {"size": 8, "depth": 3}, "adapt": False,
}  # fmt: skip


def start_and_generate(target: str, is_hybrid: bool, **options: Any) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees for batches of three and of one."""
    if is_hybrid:
        rehearse_in_float32()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    texts = random_prompts([5, 9, 20])
    return plain_and_trees(TREES, target, texts, params, **options)


@pytest.fixture(scope="module", params=["MiMo", "Qwen3Next"])
def answers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("mtp")
    folder, is_hybrid = directory / "target", request.param != "MiMo"
    target = save_experts(folder, request.param) if is_hybrid else save_mimo(folder)
    return call_on_gpu(start_and_generate, directory, target=target, is_hybrid=is_hybrid)


@pytest.mark.parametrize("name", ["trees", "alone"])
def test_tokens_are_those_of_plain_vllm_from_graphs(name, answers):
    check_replayed(answers[name], answers["plain"])


def test_drafts_are_accepted(answers):
    assert answers["trees"]["counts"]["tokens_per_tree"] > 1.2


def test_the_gpu_programs_target_with_recurrent_layers(tmp_path):
    """Its weights are made up."""
    target, _ = write_models(pair_of(RECURRENT, tiny=True), tmp_path, tiny=True)
    answers = call_with_images(  # its module in vLLM needs what reads them
        start_and_generate, tmp_path, on_gpu=True, target=target, is_hybrid=True,
        load_format="dummy",
    )  # fmt: skip
    for name in ("trees", "alone"):
        check_replayed(answers[name], answers["plain"])
