"""Every family once: tokens of tiny models of vLLM's classes are plain vLLM's, greedy and seeded.

A draft is the same model with noise, so trees are right at some nodes alone. Where the class is
refused as a draft, trees are what followed before. Models that read images or sounds are asked
about text alone.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import generated, metric, running
from tests.support.family_recipes import MULTIMODAL, RECIPES, VOCABULARY
from tests.support.generating import greedy_and_seeded, random_prompts
from tests.support.latents import ON_CPUS
from tests.support.multimodal import call_with_images
from tests.support.tiny_families import OPTIONS, save_family

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

LENGTHS, TOKENS = [5, 37, 60, 20], 24


def answer(folder: str, name: str, **more: Any) -> dict[str, Any]:
    """Three requests at a time: a prompt is read beside trees. Windows end within answers."""
    target, trees = save_family(Path(folder) / name, name)
    given = random_prompts(LENGTHS, VOCABULARY), greedy_and_seeded(len(LENGTHS), TOKENS)
    options: dict[str, Any] = {"model": target, **OPTIONS, "max_num_seqs": 3, **more}
    if "kv_lora_rank" in RECIPES.get(name, ()):
        options |= ON_CPUS
    with running(None, **options) as llm:
        plain = generated(llm, *given)
    with running(trees, **options) as llm:
        return {
            "plain": plain, "trees": generated(llm, *given),
            "drafts": metric(llm, "vllm:spec_decode_num_draft_tokens"),
            "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
        }  # fmt: skip


def answer_without_images(folder: str, names: list[str]) -> dict[str, Any]:
    return {name: answer(folder, name, language_model_only=True) for name in names}


def check(found: dict[str, Any]) -> None:
    assert found["trees"] == found["plain"]
    assert len({token for tokens in found["plain"] for token in tokens}) > 20
    assert found["drafts"] > found["accepted"] > 10


@pytest.mark.parametrize("name", RECIPES)
def test_tokens_are_those_of_plain_vllm(name, tmp_path):
    check(answer(str(tmp_path), name))


@pytest.fixture(scope="module")
def without_images(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("without_images")
    names = [*MULTIMODAL]
    return call_with_images(answer_without_images, folder, folder=str(folder), names=names)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_tokens_of_models_that_read_images_or_sounds(name, without_images):
    check(without_images[name])
