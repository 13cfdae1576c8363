"""Runs vLLM's warm-up of Model Runner V2 with each size of tree that needs its own kernel."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch


class _RunnerWith:
    """A model runner with some attributes replaced, for vLLM's warm-up to read."""

    def __init__(self, runner: Any, **instead: Any) -> None:
        vars(self).update(instead)
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def warm_up(original: Callable[..., None], runner: Any, *steps: Any) -> None:
    """Calls the worker's `warmup_kernels` once for each size in `warmed_sizes`.

    vLLM's warm-up gives every request the whole tree, when the KV cache has already taken the
    memory left by profiling. We limit the requests: logits of more nodes than the schedule ever
    scores may not fit.
    """
    limited = copy(runner.scheduler_config)
    fitting = max(1, runner.speculator.most_scored // runner.tree.size)
    limited.max_num_seqs = min(limited.max_num_seqs, fitting)
    masks = runner.structured_outputs_worker
    for nodes in warmed_sizes(runner.tree.size, runner.vllm_config.model_config.dtype):
        masks.largest = nodes
        smaller = {"num_speculative_steps": nodes - 1, "decode_query_len": nodes}
        original(_RunnerWith(runner, scheduler_config=limited, **smaller), *steps)
    masks.largest = runner.tree.size


def warmed_sizes(tree_size: int, dtype: torch.dtype) -> list[int]:
    """Sizes of trees that together compile every version of the tree attention kernel.

    Near ``max_model_len`` any prefix of the tree may be scored. The kernel's tile grows by powers
    of two with a tree's nodes (`choose_tile`); float32 has only one tile.
    """
    if dtype == torch.float32:
        return [tree_size]
    return [tree_size, *(1 << bits for bits in range(1, (tree_size - 1).bit_length()))]
