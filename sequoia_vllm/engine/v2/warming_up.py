"""vLLM's warm-up of Model Runner V2, for all sizes of trees that fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch


class _RunnerWith:
    """A model runner as vLLM's warm-up reads it, with some attributes of other values."""

    def __init__(self, runner: Any, **instead: Any) -> None:
        vars(self).update(instead)
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def warm_up(original: Callable[..., None], runner: Any, *steps: Any) -> None:
    """Calls the worker's `warmup_kernels` once for each size in `warmed_sizes`.

    vLLM's gives every request the whole tree, after the KV cache has taken the memory that
    profiling left. Logits of more nodes than a schedule ever scores may not fit, so fewer requests
    run.
    """
    limited = copy(runner.scheduler_config)
    fitting = max(1, runner.speculator.most_scored // runner.tree.size)
    limited.max_num_seqs = min(limited.max_num_seqs, fitting)
    for nodes in warmed_sizes(runner.tree.size, runner.vllm_config.model_config.dtype):
        smaller = {"num_speculative_steps": nodes - 1, "decode_query_len": nodes}
        original(_RunnerWith(runner, scheduler_config=limited, **smaller), *steps)


def warmed_sizes(tree_size: int, dtype: torch.dtype) -> list[int]:
    """Sizes of trees that between them meet every version of the tree attention kernel.

    Trees of any size are scored near ``max_model_len``. The kernel's tile grows by powers of
    two with the nodes of a tree (`choose_tile`); in float32 there is one.
    """
    if dtype == torch.float32:
        return [tree_size]
    return [tree_size, *(1 << bits for bits in range(1, (tree_size - 1).bit_length()))]
