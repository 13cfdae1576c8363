"""Blocks of the prefix cache hold what prefill writes: the keys and values of committed tokens."""

import pytest
import torch
from vllm import SamplingParams

from tests.support.cache_contents import PrefixCache
from tests.support.engines import metric, running, sequoia
from tests.support.models import DRAFT, TARGET, prompts
from tests.support.soak.in_engine import answers
from tests.support.soak.random_requests import random_requests

pytestmark = pytest.mark.engine

BLOCK = 32
REQUESTS = random_requests(prompts(32), 80, seed=3, vocabulary=4096)
# Trees for up to four requests; with more the draft rests, so that it lags behind.
RESTING = [[1, 4, 15], [5, 8, 0]]
CHECKED_EVERY = 10  # steps


class Contents:
    """What was found in cached blocks by their tokens, at different times and places."""

    def __init__(self, cache: PrefixCache, is_draft: bool) -> None:
        self._cache, self._is_draft = cache, is_draft
        self._layers = cache.layers(is_draft)
        self.found: dict[tuple[int, ...], torch.Tensor] = {}
        self.changes = 0.0  # the largest difference between blocks of the same tokens
        self.seen = self.unfilled = 0

    def look(self) -> None:
        """Looks at the draft's cache, at the blocks that count as filled."""
        filled = self._cache.runner.draft_progress._blocks._filled if self._is_draft else None
        for block, prefix in self._cache.cached(self._layers.group):
            if filled is not None and block not in filled:
                self.unfilled += 1
                continue
            self.seen += 1
            values = self._layers.of_block(block)
            known = self.found.setdefault(prefix, values)
            self.changes = max(self.changes, float((known - values).abs().max()))


@pytest.fixture(scope="module")
def after_random_requests():
    """Both models' blocks, looked at amid requests that come, leave and are preempted."""
    options = {
        "kv_cache_memory_bytes": 9 << 20, "block_size": BLOCK, "max_num_batched_tokens": 96,
        "enable_prefix_caching": True,
    }  # fmt: skip
    config = sequoia(num_speculative_tokens_per_batch_size=RESTING)
    with running(config, **options) as llm:
        cache = PrefixCache(llm)
        models = [Contents(cache, is_draft) for is_draft in (False, True)]
        step, steps = llm.llm_engine.step, 0

        def looking():
            nonlocal steps
            outputs = step()
            steps += 1
            if steps % CHECKED_EVERY == 0:
                for model in models:
                    model.look()
            return outputs

        llm.llm_engine.step = looking
        answers(llm, REQUESTS)
        assert metric(llm, "vllm:num_preemptions") > 10
        assert metric(llm, "vllm:prefix_cache_hits") > 1000
        assert metric(llm, "sequoia:trees") > 300
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 300
    return dict(zip((TARGET, DRAFT), models, strict=True))


def prefilled(model: str, prefixes: list[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
    """The same blocks of an engine without trees that reads these tokens as prompts."""
    inner = {prefix[:-BLOCK] for prefix in prefixes}
    longest = [{"prompt_token_ids": list(one)} for one in prefixes if one not in inner]
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    options = {"kv_cache_memory_bytes": 1 << 30, "block_size": BLOCK, "max_model_len": 544}
    with running(None, model=model, enable_prefix_caching=True, **options) as llm:
        cache = PrefixCache(llm)
        llm.generate(longest, params, use_tqdm=False)
        layers = cache.layers()
        return {prefix: layers.of_block(block) for block, prefix in cache.cached(layers.group)}


@pytest.mark.parametrize("model", [TARGET, DRAFT], ids=["target", "draft"])
def test_cached_blocks_hold_what_prefill_writes(model, after_random_requests):
    """Wherever and whenever they were found."""
    contents = after_random_requests[model]
    assert contents.seen > 300
    assert (contents.unfilled > 50) == (model == DRAFT)
    expected = prefilled(model, list(contents.found))
    assert contents.changes < 1e-4
    for prefix, found in contents.found.items():
        torch.testing.assert_close(found, expected[prefix], rtol=0, atol=1e-4)
