"""Trees over recurrent layers and latent attention on vLLM's GPU engine, from graphs.

The targets are Qwen3Next (Gated DeltaNet), GraniteMoeHybrid and NemotronH (Mamba2), Lfm2
(convolutions) and DeepseekV3 (MLA). `test_images` has Qwen3.5.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.calling import called_once
from tests.support.engines import sequoia
from tests.support.generating import greedy_and_seeded, random_prompts
from tests.support.latents import rehearse_on_gpus, save_latent_pair
from tests.support.mamba import rehearse_as_on_gpus, save_mamba_pair
from tests.support.models import save_word_tokenizer
from tests.support.on_gpu import call_on_gpu
from tests.support.recurrent import VOCABULARY, rehearse_in_float32, save_hybrid_pair
from tests.support.rehearsing import (
    check_replayed,
    generate,
    generate_with_trees,
    join_and_abort,
    rehearsing,
)

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

LENGTHS = [5, 9, 20, 33, 14]
TOKENS, ABORTED = 12, 1
WITH_GRAMMAR = [2, 3]


def params() -> list[Any]:
    """Greedy and seeded in turn; two with a grammar of four words."""
    from vllm.sampling_params import StructuredOutputsParams

    found = greedy_and_seeded(len(LENGTHS), TOKENS)
    for index in WITH_GRAMMAR:
        found[index].structured_outputs = StructuredOutputsParams(regex=f"(w[3-6]){{{TOKENS}}}")
    return found


def save_pair(models: str, name: str) -> tuple[str, str]:
    """Saves a target and a draft that is often right, and lets vLLM run them here."""
    if name == "Qwen3Next":
        rehearse_in_float32()
        return save_hybrid_pair(Path(models), scale=0.1)
    if name == "DeepseekV3":
        rehearse_on_gpus()
        return save_latent_pair(Path(models))
    rehearse_as_on_gpus()
    return save_mamba_pair(Path(models), name, scale=0.1)


def start_and_generate(models: str, name: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees: for a batch of three, for one, and as requests come."""
    pair = save_pair(models, name)
    for path in pair:
        save_word_tokenizer(Path(path))
    texts, options = random_prompts(LENGTHS, VOCABULARY), {"model": pair[0]}
    options["skip_tokenizer_init"] = False
    plain = {"attention_config": {"backend": "TRITON_MLA"}} if name == "DeepseekV3" else {}
    with rehearsing(None, **options, **plain) as llm:
        answers = {"plain": generate(llm, texts, params())}
    with rehearsing(sequoia(8, 3, draft=pair[1]), as_users_start=True, **options) as llm:
        answers["trees"] = generate_with_trees(llm, texts[:3], params()[:3])
        answers["alone"] = generate_with_trees(llm, texts[:1], params()[:1])
        answers["joining"] = join_and_abort(llm, texts, params(), ABORTED)
    return answers


KINDS = ["Qwen3Next", "GraniteMoeHybrid", "NemotronH", "Lfm2", "DeepseekV3"]
answers = called_once(call_on_gpu, start_and_generate, ("name", KINDS))


@pytest.mark.parametrize("name", ["trees", "alone"])
def test_tokens_are_those_of_plain_vllm_and_no_recurrent_layer_leaves_its_graph(name, answers):
    check_replayed(answers[name], answers["plain"])


def test_requests_join_and_are_aborted(answers):
    plain = answers["plain"]["tokens"]
    assert answers["joining"]["tokens"] == plain[:ABORTED] + plain[ABORTED + 1 :]
    assert answers["joining"]["eager growth"] == []
    modes = answers["joining"]["modes"]
    assert modes["FULL"] > 0
    assert modes["PIECEWISE beside prompts"] > 0
    assert "FULL beside prompts" not in modes  # as for attention that our kernel has all of


def test_grammars_are_followed(answers):
    for index in WITH_GRAMMAR:
        assert set(answers["plain"]["tokens"][index][0]) <= {3, 4, 5, 6}


@pytest.mark.parametrize("name", ["trees", "joining"])
def test_drafts_are_accepted(name, answers):
    assert answers[name]["counts"]["tokens_per_tree"] > 1.2
