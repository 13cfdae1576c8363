"""Blocks of the prefix cache hold what prefill writes: the keys and values of committed tokens.

So do blocks that vLLM's OffloadingConnector stored while trees ran, and loads later.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import get_group_id

from sequoia_vllm.attention.cpu_kernel import keys_and_values
from tests.support.engines import (
    metric,
    noting,
    runner_of,
    running,
    scheduler_of,
    sequoia,
    whole_trees,
)
from tests.support.generating import TINY, check_logprobs, random_prompts, save_related_pair
from tests.support.models import DRAFT, TARGET, prompts
from tests.support.soak.in_engine import answers
from tests.support.soak.random_requests import random_requests
from tests.support.stored_cache import (
    CONNECTOR,
    LENGTHS,
    CopyingWorker,
    answer_crowded,
    check_crowded,
    converse_twice,
)

pytestmark = pytest.mark.engine

BLOCK = 32
REQUESTS = random_requests(prompts(32), 80, seed=3, vocabulary=4096)
# Trees for up to four requests; with more the draft rests, so that it lags behind.
RESTING = [[1, 4, 15], [5, 8, 0]]
CHECKED_EVERY = 10  # steps
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)

Prefix = tuple[int, ...]
"""All tokens up to the end of a block: its keys and values depend on them."""


@dataclass(frozen=True)
class Layers:
    """A model's layers that have keys and values, and their cache group."""

    group: int
    caches: list[Tensor]

    def of_block(self, block: int) -> Tensor:
        """Its keys and values, ``[layers, 2, heads, block_size, head_size]``, copied."""
        found = [keys_and_values(cache[block : block + 1]) for cache in self.caches]
        return torch.stack([torch.cat(pair) for pair in found])


class PrefixCache:
    """Follows which tokens vLLM takes a block to hold when it puts it into its prefix cache.

    Args:
        llm: An engine in this process, on the V1 runner, that had no requests yet.
    """

    def __init__(self, llm: Any) -> None:
        self.runner = runner_of(llm)
        self._pool = scheduler_of(llm).kv_cache_manager.block_pool
        self._prefixes: dict[tuple[int, int], Prefix] = {}
        self._put = self._pool.cache_full_blocks
        self._pool.cache_full_blocks = self._follow

    def _follow(self, **keys: Any) -> Any:
        """In the place of the pool's method, which vLLM calls with names alone."""
        group, size = keys["kv_cache_group_id"], keys["block_size"]
        for place in range(keys["num_cached_blocks"], keys["num_full_blocks"]):
            prefix = tuple(keys["request"].all_token_ids[: (place + 1) * size])
            self._prefixes[group, keys["blocks"][place].block_id] = prefix
        return self._put(**keys)

    def layers(self, is_draft: bool = False) -> Layers:
        modules = self.runner.compilation_config.static_forward_context
        drafter = getattr(self.runner, "drafter", None)
        of_draft = drafter._draft_attn_layer_names if drafter is not None else ()
        names = [name for name in modules if (name in of_draft) == is_draft]
        groups = self.runner.kv_cache_config.kv_cache_groups
        [group] = [place for place, one in enumerate(groups) if names[0] in one.layer_names]
        assert set(names) <= set(groups[group].layer_names)
        return Layers(group, [modules[name].kv_cache for name in names])

    def cached(self, group: int) -> Iterator[tuple[int, Prefix]]:
        """The blocks of a group that a request could find now, each with what it should hold."""
        known = self._pool.cached_block_hash_to_block
        for (of_group, block), prefix in self._prefixes.items():
            key = self._pool.blocks[block].block_hash
            if of_group == group and key is not None and get_group_id(key) == group:
                assert known.contain(key, block)
                yield block, prefix


class Contents:
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
    contents = after_random_requests[model]
    assert contents.seen > 300
    assert (contents.unfilled > 50) == (model == DRAFT)
    expected = prefilled(model, list(contents.found))
    assert contents.changes < 1e-4
    for prefix, found in contents.found.items():
        torch.testing.assert_close(found, expected[prefix], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def related(tmp_path_factory):
    return save_related_pair(tmp_path_factory.mktemp("pair"))


def test_blocks_of_a_resumed_request_that_a_new_one_found_are_read_once(related):
    """vLLM names resumed requests behind new ones, which may have found their blocks."""
    target, draft = related
    shared, *own = (one["prompt_token_ids"] for one in random_prompts([2 * BLOCK, 5, 9]))
    first, second = ({"prompt_token_ids": shared + tokens} for tokens in own)
    config = whole_trees(size=8, depth=3, draft=draft)
    with running(config, model=target, enable_prefix_caching=True, **TINY) as llm:
        engine = llm.llm_engine
        engine.add_request("first", first, LONG)
        engine.step()
        assert llm.reset_prefix_cache(reset_running_requests=True)  # it is preempted
        engine.add_request("second", second, LONG)
        drafter = runner_of(llm).drafter
        with noting(drafter, "advance", lambda read: np.bincount(read.positions)) as times:
            engine.step()
        assert metric(llm, "vllm:num_preemptions") == 1
        assert metric(llm, "vllm:prefix_cache_hits") == len(shared)
    [read] = times
    assert read[: len(shared)].tolist() == [1] * len(shared)
    assert read[len(shared)] == 2


# -- vLLM's OffloadingConnector: what it stored while trees ran, it loads later ---------------

# So few blocks that later turns get some which the draft had filled.
STORED = {**TINY, "enable_prefix_caching": True, "num_gpu_blocks_override": 18}
CROWDED = 12  # blocks: one is nobody's, two of eight requests take ten at their ends


@pytest.fixture(scope="module")
def conversations(related):
    target, draft = related
    with running(None, model=target, **STORED) as llm:
        found = {"plain": converse_twice(llm, trees=False)}
    trees, options = whole_trees(size=8, depth=3, draft=draft), {"model": target, **STORED}
    for name, forgets in (("stored", False), ("without the draft's", True)):
        with (
            patch.object(CopyingWorker, "forgets_draft", forgets),
            running(trees, kv_transfer_config=KVTransferConfig(**CONNECTOR), **options) as llm,
        ):
            found[name] = converse_twice(llm, trees=True)
    return found


@pytest.mark.parametrize("name", ["stored", "without the draft's"])
def test_turns_on_loaded_keys_are_those_of_plain_vllm(name, conversations):
    """Blocks of answers are stored, too: trees wrote behind their ends."""
    plain, found = conversations["plain"], conversations[name]
    assert plain["loaded"] == 0
    assert found["loaded"] == sum((length + 49) // 32 * 32 for length in LENGTHS)
    assert found["tokens"] == plain["tokens"]
    for turn, expected in zip(found["logprobs"], plain["logprobs"], strict=True):
        assert check_logprobs(turn, expected) > 0


def test_the_draft_reads_again_what_was_loaded(conversations):
    """A block may be stored before the draft has read it."""
    _, later = conversations["without the draft's"]["tokens per tree"]
    assert later == conversations["stored"]["tokens per tree"][1] > 1.5


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "a step late"])
def test_preempted_requests_whose_keys_are_loaded_answer_as_plain_vllm(is_late, related):
    """vllm#57104: none may wait for blocks that another one holds while it is loaded."""
    target, draft = related
    with running(None, model=target, **TINY) as llm:
        plain = answer_crowded(llm, trees=False)
    few = {**STORED, "num_gpu_blocks_override": CROWDED, "max_model_len": 192}
    trees, transfer = whole_trees(size=8, depth=3, draft=draft), KVTransferConfig(**CONNECTOR)
    with (
        patch.object(CopyingWorker, "is_late", is_late),
        running(trees, model=target, kv_transfer_config=transfer, **few) as llm,
    ):
        found = answer_crowded(llm, trees=True)
    check_crowded(found, plain)
