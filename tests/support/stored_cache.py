"""Conversations whose second turns vLLM's OffloadingConnector loads, and a store in host memory."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from tests.support.engines import metric, runner_of
from tests.support.generating import answered, counted, greedy_and_seeded, random_prompts

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
    had not read a block when it was stored.
    """

    forgets_draft = False

    def __init__(self, caches: Any, chunks: int) -> None:
        self._refs = caches.group_data_refs
        self._caches = [cache.tensor for cache in caches.tensors]
        self._store = [torch.zeros_like(cache[:1]).repeat(chunks, 1) for cache in self._caches]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, src_spec, self._caches, dst_spec, self._store)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, self._store, dst_spec, self._caches)

    def _copy(self, job: int, cache: Any, source: Any, of: Any, target: Any, into: Any) -> bool:
        assert len(source.block_ids) == len(target.block_ids)  # a chunk is a block
        start = 0
        for refs, size in zip(self._refs, cache.group_sizes, strict=True):
            for tensor in {ref.tensor_idx for ref in refs}:
                rows = of[tensor][source.block_ids[start : start + size]]
                if self.forgets_draft and tensor == len(of) - 1:
                    rows = torch.zeros_like(rows)
                into[tensor][target.block_ids[start : start + size]] = rows
            start += size
        self._done.append(TransferResult(job, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


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
