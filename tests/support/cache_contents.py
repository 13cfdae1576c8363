"""What an engine's prefix cache says that its blocks hold, and what they do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.core.kv_cache_utils import get_group_id

from sequoia_vllm.attention.cpu_cache import keys_and_values
from tests.support.engines import runner_of

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
        engine = llm.llm_engine
        self.runner = runner_of(llm)
        manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
        self._pool = manager.block_pool
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
        """The target's, or the draft's."""
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
