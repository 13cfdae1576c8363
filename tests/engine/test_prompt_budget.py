"""What drafted requests leave of a step's token budget to a prompt, against plain vLLM and a chain.

Schedulers are vLLM's and ours, over a real configuration and cache manager, without a model. They
schedule ahead, so that no step needs the outcome of the one before it.
"""

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from sequoia_vllm.engine.core.scheduling_ahead import TreeSchedulingAhead
from tests.support.engines import configured, lookup_trees, sequoia
from tests.support.models import DRAFT

NODES, BUDGET, LONGEST, BLOCK = 16, 1536, 2048, 16
LIMITS = {
    "max_model_len": LONGEST, "max_num_batched_tokens": BUDGET, "max_num_seqs": 64,
    "enable_prefix_caching": False,
}  # fmt: skip
CHAIN = {"model": DRAFT, "num_speculative_tokens": NODES - 1}


def chunk_beside(requests: int, speculative_config, kind=TreeSchedulingAhead) -> tuple[int, int]:
    """Rows of a long prompt beside so many requests that decode, and the drafts of each of them."""
    config = configured(speculative_config, **LIMITS)
    layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(1 << 13, [], [KVCacheGroupSpec(["layer"], layers)])
    config.cache_config.num_gpu_blocks = cache.num_blocks
    scheduler = kind(config, cache, StructuredOutputManager(config), BLOCK)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    def add(name: str, length: int) -> None:
        scheduler.add_request(Request(name, list(range(length)), params, None))

    for index in range(requests):
        add(str(index), 9)
    scheduler.schedule()
    add("long", LONGEST - 300)
    step = scheduler.schedule()
    drafts = {len(step.scheduled_spec_decode_tokens.get(str(i), ())) for i in range(requests)}
    assert len(step.num_scheduled_tokens) == requests + 1
    assert step.total_num_scheduled_tokens <= BUDGET
    return step.num_scheduled_tokens["long"], *drafts


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("trees", [sequoia(NODES), lookup_trees(size=NODES)], ids=["model", "none"])
def test_trees_take_their_rows_and_no_more_from_prompts(trees, requests):
    """For a draft model's chain vLLM sets a slot of each request aside; so it does for trees."""
    plain, none = chunk_beside(requests, None, AsyncScheduler)
    chunk, drafts = chunk_beside(requests, trees)
    assert (plain, none, drafts) == (BUDGET - requests, 0, NODES - 1)
    aside = requests + 1
    assert plain - requests * drafts - aside <= chunk <= plain - requests * drafts
    assert chunk >= BUDGET // 2
    assert requests > 1 or chunk > 0.98 * plain


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_prompts_have_as_much_beside_trees_as_beside_chains_of_as_many_drafts(requests):
    of_chains = chunk_beside(requests, CHAIN, AsyncScheduler)
    assert chunk_beside(requests, sequoia(NODES)) == of_chains
