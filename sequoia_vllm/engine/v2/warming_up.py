"""vLLM's warm-up of Model Runner V2, with no more trees than there is memory for."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any


def warm_up(original: Callable[..., None], runner: Any, *steps: Any) -> None:
    """Calls the worker's `warmup_kernels`, which gives every request the whole tree.

    It comes after the KV cache has taken what profiling left: logits of more nodes than a
    schedule ever scores may not fit.

    Args:
        original: vLLM's.
        runner: Ours; vLLM's function reads there how many requests there may be.
        steps: What runs a step.
    """
    whole = runner.scheduler_config
    fitting = max(1, runner.speculator.most_scored // runner.tree.size)
    runner.scheduler_config = copy(whole)
    runner.scheduler_config.max_num_seqs = min(whole.max_num_seqs, fitting)
    try:
        original(runner, *steps)
    finally:
        runner.scheduler_config = whole
