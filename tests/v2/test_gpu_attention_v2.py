"""What trees use on GPUs, run by Triton's interpreter: attention, cache layout and commit.

Plain tokens are those of vLLM's TRITON_ATTN in the same process.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v2.conftest import call_on_v2
from tests.v2.generating import generate, generate_with_trees, random_prompts, save_related_pair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Two layers, and heads that share keys.
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
# Blocks as small as on GPUs: trees reach over their ends.
OPTIONS = {"skip_tokenizer_init": True, "block_size": 16}
LENGTHS = [9, 40, 23]


def params() -> list[Any]:
    """Greedy, with a seed, greedy."""
    from vllm import SamplingParams

    common = {"max_tokens": 14, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=3, **common),
        SamplingParams(temperature=0, **common),
    ]


def generate_as_on_gpus(models: str) -> dict[str, Any]:
    """Of plain vLLM, of trees (first beside chunks of prompts), and from the target itself."""
    target, draft = save_related_pair(Path(models), **SHAPE)
    requests, options = random_prompts(LENGTHS), {"model": target, **OPTIONS}
    trees = {"size": 8, "depth": 3, "max_num_batched_tokens": 24, **options}
    return {
        "plain": generate(None, requests, params(), **options),
        "trees": generate_with_trees(draft, requests, params(), **trees),
        "from itself": generate_with_trees(target, requests, params(), **trees),
    }


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("gpu-attention")
    return call_on_v2(generate_as_on_gpus, directory, gpu_attention=True, models=str(directory))


def test_attention_is_that_of_gpus(generated):
    assert generated["plain"]["attention"] == "TritonAttentionImpl"
    assert generated["trees"]["attention"] == "TritonTreeImpl"


@pytest.mark.parametrize("trees", ["trees", "from itself"])
def test_tokens_are_those_of_plain_vllm(trees, generated):
    assert generated[trees]["tokens"] == generated["plain"]["tokens"]
    assert generated[trees]["counts"]["tokens_per_tree"] > 1.5


def test_all_that_the_target_drafts_itself_is_accepted(generated):
    counts = generated["from itself"]["counts"]
    offered, accepted = (np.array(counts[name]) for name in ("offered", "accepted"))
    assert counts["tree_steps"] > 6
    assert accepted[:, 0].tolist() == offered[:, 0].tolist()
    assert accepted[:, 1:].sum() == 0
