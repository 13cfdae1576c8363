"""Trees over Gated DeltaNet layers (Qwen3NextForCausalLM) on vLLM's GPU engine, from graphs."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import sequoia
from tests.support.generating import random_prompts
from tests.support.on_gpu import call_on_gpu
from tests.support.recurrent import VOCABULARY, convolve_prompts, run_in_float32, save_hybrid_pair
from tests.support.rehearsing import check_replayed, plain_and_trees

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def start_and_generate(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees for batches of three and of one."""
    from vllm import SamplingParams
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # stand-ins first: layers import some of them by name
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers

    run_in_float32()
    layers.causal_conv1d_fn = convolve_prompts
    target, draft = save_hybrid_pair(Path(models), scale=0.1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    texts = random_prompts([5, 9, 20], VOCABULARY)
    return plain_and_trees(sequoia(8, 3, draft=draft), target, texts, params)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("recurrent")
    return call_on_gpu(start_and_generate, directory, models=str(directory))


@pytest.mark.parametrize("name", ["trees", "alone"])
def test_tokens_are_those_of_plain_vllm_and_no_recurrent_layer_leaves_its_graph(name, answers):
    check_replayed(answers[name], answers["plain"])


def test_drafts_are_accepted(answers):
    assert answers["trees"]["counts"]["tokens_per_tree"] > 1.2
