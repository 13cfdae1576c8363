"""A real chat model, where somebody has fetched it: random requests get plain vLLM's answers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from examples.smollm2 import cached_folder, is_cached
from tests.support.engines import metric, running, sequoia
from tests.support.soak.in_engine import answers, differences
from tests.support.soak.random_requests import random_requests
from tests.support.train_drafter import script_modules

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.skipif(not is_cached(cached_folder()), reason="run python -m examples.smollm2"),
]


def write_noisy_copy(model: str | Path, folder: Path, noise: float, seed: int = 0) -> Path:
    """Writes a model whose matrices got normal noise, relative to their standard deviations."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in copy.parameters():
            if weights.ndim == 2:
                weights += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    copy.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def requests():
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


def test_random_chats(requests, tmp_path):
    """Its draft is a copy of it with noise: right for most tokens, wrong for some."""
    target = str(cached_folder())
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
