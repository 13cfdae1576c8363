"""Requests whose keys vLLM's OffloadingConnector loads, and a store in host memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from tests.support.engines import metric, noting, runner_of, scheduler_of
from tests.support.generating import (
    answered,
    counted,
    greedy_and_seeded,
    joined,
    random_prompts,
)

LENGTHS = [21, 40, 33]
CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 8 << 20,
        "offload_prompt_only": False,
        "spec_name": "StoreInHostMemory",
        "spec_module_path": __name__,
    },
}


class CopyingWorker(OffloadingWorker):
    """Copies blocks of the cache at once. vLLM's does it on streams of a GPU.

    With `forgets_draft` it stores nothing of the last layer, which is the draft's: as if the draft
    had not read a block when it was stored. With `is_late` it copies when a step has run, and says
    so a step later.
    """

    forgets_draft = is_late = False

    def __init__(self, caches: Any, chunks: int) -> None:
        self._refs = caches.group_data_refs
        self._caches = [cache.tensor for cache in caches.tensors]
        self._store = [torch.zeros_like(cache[:1]).repeat(chunks, 1) for cache in self._caches]
        self._jobs: dict[int, Callable[[], None]] = {}
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, src_spec, self._caches, dst_spec, self._store)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec, src_spec, self._store, dst_spec, self._caches)

    def _submit(self, job: int, cache: Any, source: Any, of: Any, target: Any, into: Any) -> bool:
        assert len(source.block_ids) == len(target.block_ids)  # a chunk is a block
        self._jobs[job] = partial(self._copy, cache, source, of, target, into)
        if not self.is_late:
            self.wait({job})
        return True

    def _copy(self, cache: Any, source: Any, of: Any, target: Any, into: Any) -> None:
        start = 0
        for refs, size in zip(self._refs, cache.group_sizes, strict=True):
            for tensor in {ref.tensor_idx for ref in refs}:
                rows = of[tensor][source.block_ids[start : start + size]]
                if self.forgets_draft and tensor == len(of) - 1:
                    rows = torch.zeros_like(rows)
                into[tensor][target.block_ids[start : start + size]] = rows
            start += size

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        self.wait(set(self._jobs))
        return done

    def wait(self, job_ids: set[int]) -> None:
        for job in sorted(self._jobs.keys() & job_ids):
            self._jobs.pop(job)()
            self._done.append(TransferResult(job, True))


class StoreInHostMemory(CPUOffloadingSpec):
    """vLLM's own, which refuses devices other than GPUs; the scheduler's side is unchanged."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.num_chunks)


def converse_twice(llm: Any, trees: bool) -> dict[str, Any]:
    """Two turns of three conversations; nothing but a connector's store lasts between them.

    What the engine's own cache held is overwritten by then. A step's last blocks are stored in a
    later step, which another request brings; in a small cache it takes all blocks that were left.
    """
    params = greedy_and_seeded(len(LENGTHS), 50, 0.8, logprobs=2)
    prompts = random_prompts(LENGTHS)
    first = llm.generate(prompts, params, use_tqdm=False)
    llm.generate(random_prompts([240]), SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.reset_prefix_cache()
    counts = [counted(llm)] if trees else []
    for cache in runner_of(llm).kv_caches:
        cache.fill_(9.0)
    again = [
        {"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids, 7, 9]}
        for output in first
    ]
    second = llm.generate(again, params, use_tqdm=False)
    counts += [counted(llm)] if trees else []
    turns = [answered(outputs) for outputs in (first, second)]
    return {
        "tokens": [turn["tokens"] for turn in turns],
        "logprobs": [turn["logprobs"] for turn in turns],
        "tokens per tree": [count["tokens_per_tree"] for count in counts],
        "loaded": metric(llm, "vllm:external_prefix_cache_hits"),
    }


MOST_STEPS = 2000
"""Steps within which all crowded requests end: they take some 300."""


def answer_crowded(llm: Any, trees: bool, max_tokens: int = 44) -> dict[str, Any]:
    """Eight requests that share a prefix, in a cache that is full with two of them, and once more.

    Those that are preempted are loaded when they resume; so is the prefix, once it was evicted.
    """
    [shared] = random_prompts([64])
    requests = [
        {"prompt_token_ids": shared["prompt_token_ids"] + own["prompt_token_ids"]}
        for own in random_prompts([57, 70, 45, 71, 62, 49, 65, 66])
    ]
    params = greedy_and_seeded(len(requests), max_tokens, 0.8)

    def ends(step: int) -> None:
        assert step < MOST_STEPS, "requests wait for each other"

    scheduler = type(scheduler_of(llm))
    with noting(
        scheduler, "_update_waiting_for_remote_kv", lambda _, one: one.num_preemptions
    ) as n:
        tokens = [joined(llm, requests, params, before_step=ends) for _ in range(2)]
    return {
        "tokens": tokens,
        "preemptions": metric(llm, "vllm:num_preemptions"),
        "loaded anew": sum(map(bool, n)),
        "loaded": metric(llm, "vllm:external_prefix_cache_hits"),
        "tokens per tree": counted(llm)["tokens_per_tree"] if trees else None,
    }


def check_crowded(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Whether `answer_crowded` had what it is about, and tokens are plain vLLM's."""
    assert plain["preemptions"] == plain["loaded"] == 0
    assert found["tokens"] == plain["tokens"]
    assert found["preemptions"] > 5
    assert found["loaded anew"] > 1
    assert found["loaded"] > 64
    assert found["tokens per tree"] > 1.3
