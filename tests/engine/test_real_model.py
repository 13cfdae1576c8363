"""A real chat model, where somebody has fetched it: random requests get plain vLLM's answers."""

import pytest
from transformers import AutoTokenizer

from examples.smollm2.cache import cached_folder, is_cached
from tests.support.engines import metric, running, sequoia
from tests.support.noisy_copy import write_noisy_copy
from tests.support.soak.in_engine import answers, differences
from tests.support.soak.random_requests import random_requests
from tests.support.train_drafter import script_modules

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.skipif(not is_cached(cached_folder()), reason="run python -m examples.smollm2"),
]


@pytest.fixture(scope="module")
def requests():
    """Chats of all kinds in the model's template: greedy and seeded, with rarer parameters."""
    tokenizer = AutoTokenizer.from_pretrained(cached_folder())
    with script_modules("chat_prompts") as scripts:
        asked = scripts.chat_prompts.prompts(True, 20, seed=3)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one.text}], add_generation_prompt=True, tokenize=False
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
