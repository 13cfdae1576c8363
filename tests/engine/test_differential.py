"""Random requests of all kinds in one engine, on a KV cache too small for them: plain's answers.

Each kind of trees has 300 requests, and every parameter is in some of them: all kinds of requests
are served, amid preemptions and beside chunks of prompts. Rare parameters meet in few batches here;
``SEQUOIA_VLLM_SOAK`` says how many requests each has instead. Only requests with one right answer
are compared, and those are matched: traversal merely runs beside them.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2 import cached_folder, is_cached
from tests.support.engines import lookup_trees, metric, running, scheduler_of, sequoia
from tests.support.models import prompts
from tests.support.soak.in_engine import answers, differences
from tests.support.soak.random_requests import RandomRequest, random_requests
from tests.support.train_drafter import script_modules

pytestmark = pytest.mark.engine

COUNT = int(os.environ.get("SEQUOIA_VLLM_SOAK", "300"))
REQUESTS = random_requests(prompts(32), 2 * COUNT, seed=14, vocabulary=4096)
SHARDED = pytest.mark.sharded
TREES = [
    pytest.param(
        sequoia(verification="sequoia", retrieval=True, dynamic_tree=True),
        REQUESTS[:COUNT], id="sequoia",
    ),
    pytest.param(
        sequoia(verification="traversal", retrieval=True), REQUESTS[COUNT:],
        id="traversal", marks=SHARDED,
    ),
    pytest.param(lookup_trees(), REQUESTS[:COUNT], id="lookup", marks=SHARDED),
]  # fmt: skip
OPTIONS = {
    "kv_cache_memory_bytes": 8 << 20,  # dozens of preemptions
    "block_size": 32,
    "max_num_batched_tokens": 96,  # prompts are read in chunks
    "enable_prefix_caching": True,
}


@pytest.mark.parametrize(("trees", "requests"), TREES)
def test_random_requests(trees, requests):
    # With memory for all: plain vLLM stops on CPUs where a seeded prompt is read in chunks.
    with running(None, max_num_batched_tokens=8192) as llm:
        plain = answers(llm, requests, leaving=False)
    with running(trees, **OPTIONS) as llm:
        different = differences(llm, requests, plain)
        assert not different, "\n".join(map(str, different))
        assert scheduler_of(llm).kv_cache_manager.usage == 0.0
        assert metric(llm, "vllm:num_preemptions") > 10
        assert metric(llm, "vllm:prefix_cache_hits") > 1000
        assert metric(llm, "sequoia:trees") > 1000


def write_noisy_copy(model: str | Path, folder: Path, noise: float) -> Path:
    """Writes a model whose matrices got normal noise, relative to their standard deviations."""
    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in copy.parameters():
            if weights.ndim == 2:
                weights += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    copy.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def chats() -> list[RandomRequest]:
    """Chats of all kinds in the model's template: greedy and seeded, with rarer parameters."""
    tokenizer = AutoTokenizer.from_pretrained(cached_folder())
    with script_modules("chat_prompts") as scripts:
        asked = scripts.chat_prompts.prompts(True, 20, seed=3)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one.prompt}], add_generation_prompt=True, tokenize=False
        )
        for one in asked
    ]
    return random_requests(texts, 20, seed=5, vocabulary=49_152)


@pytest.mark.sharded
@pytest.mark.skipif(not is_cached(cached_folder()), reason="run python -m examples.smollm2")
def test_random_chats(tmp_path):
    """A real chat model, where somebody has fetched it; its draft is a copy of it with noise.

    It is right for most tokens, and wrong for some.
    """
    requests, target = chats(), str(cached_folder())
    draft = write_noisy_copy(target, tmp_path, noise=0.1)
    options = {"max_model_len": 1024, "kv_cache_memory_bytes": 512 << 20}
    with running(None, target, max_num_batched_tokens=8192, **options) as llm:
        plain = answers(llm, requests, leaving=False)
    with running(sequoia(draft=str(draft)), target, **options) as llm:
        different = differences(llm, requests, plain)
        assert not different, "\n".join(map(str, different))
        trees, tokens = metric(llm, "sequoia:trees"), metric(llm, "sequoia:emitted_tokens")
    print(f"{len(requests)} requests, {tokens:.0f} tokens in {trees:.0f} trees")
    assert 1.2 < tokens / trees < 5
