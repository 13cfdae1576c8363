"""The worker of a Sequoia engine on GPUs, and its warm-up with each size of tree."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from vllm.v1.worker import gpu_worker

from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.compat.contract import check_contract
from sequoia_vllm.engine.worker.worker_base import AgreeingWorker, SequoiaWorker


class PlainGPUWorker(AgreeingWorker):
    """Worker that decodes without drafts when every node expects speculation to be slower."""


class SequoiaGPUWorker(SequoiaWorker):
    """vLLM's GPU worker with our model runner."""

    def _make_model_runner(self) -> Any:
        """Replaces vLLM's: the V2 runner with trees."""
        from sequoia_vllm.engine.v2.runner_gpu import SequoiaGPUModelRunner

        check_contract(v2=True)
        return SequoiaGPUModelRunner(self.vllm_config, self.device)

    # Until: its warm-up has a sampled request without penalties; for statistics: never.
    def compile_or_warm_up_model(self) -> Any:
        """Warms up what vLLM's requests do not reach, then calls vLLM's.

        At its end vLLM begins to warn of kernels that are compiled late.
        """
        self.model_runner.rejection_sampler.warm_up(self.model_config.dtype)
        fewer_requests = partial(warm_up, gpu_worker.warmup_kernels)
        # Scores the largest number of drafts for max_num_seqs requests after the KV cache has taken
        # the memory: many times the logits of any scheduled step, and no smaller trees. Ours shows
        # it a runner with fewer requests, once for each size of trees. Until: vLLM's warm-up
        # follows its schedule by batch size.
        with patched(gpu_worker, "warmup_kernels", fewer_requests):
            return super().compile_or_warm_up_model()


class _RunnerWith:
    """A model runner with some attributes replaced, for vLLM's warm-up to read."""

    def __init__(self, runner: Any, **instead: Any) -> None:
        vars(self).update(instead)
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def warm_up(original: Callable[..., None], runner: Any, *steps: Any) -> None:
    """Calls the worker's `warmup_kernels` once for each size of tree that needs its own kernel.

    vLLM's warm-up gives every request the whole tree, once the KV cache has taken the memory. We
    limit the requests: logits of more nodes than the schedule ever scores may not fit.
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
