"""Two replicas of a mixture of experts, which meet in every forward pass of the target.

They run as vLLM's example of offline data parallelism does, each with an engine core of its own.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.quick_start.quick_imports import FORK_ENGINES
from tests.support.cores import needs_two_cores
from tests.support.engines import running, sequoia
from tests.support.generating import completions, counted, random_prompts
from tests.support.mixtures import save_mixture_pair
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import rehearsing
from tests.support.serving import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

PROMPTS = random_prompts([9, 14])
# Tokens of the requests of each replica, at a time: first one of them has done before the other.
WAVES = [([12, 10], [5]), ([4], [9, 11])]
# So that replicas have unequal numbers of drafts, too.
SCHEDULE = [[1, 1, 5], [2, 2, 3]]


def greedy(tokens: list[int]) -> list[Any]:
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    return [SamplingParams(max_tokens=number, **common) for number in tokens]


def count_idle_steps(worker: Any) -> None:
    """Called in an engine core: from now on."""
    run, worker.idle_steps = worker.model_runner._dummy_run, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        worker.idle_steps += 1
        return run(*args, **kwargs)

    worker.model_runner._dummy_run = counting


def report(worker: Any) -> dict[str, Any]:
    """Called in an engine core."""
    from gpu_stand_in import graphs

    return {"idle steps": worker.idle_steps, **graphs.report()["replayed"]}


def generate_on_replica(rank: int, port: int, target: str, draft: str) -> dict[str, Any]:
    """This replica's requests."""
    os.environ |= {
        "VLLM_DP_RANK": str(rank), "VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # an engine core that knows of lock step
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions to it
        FORK_ENGINES: "1",
    }  # fmt: skip
    config = sequoia(6, 2, draft, num_speculative_tokens_per_batch_size=SCHEDULE)
    options = {"max_num_seqs": 2, "distributed_executor_backend": "uni"}  # no more processes
    with rehearsing(config, model=target, **options) as llm:
        llm.collective_rpc(count_idle_steps)
        tokens = []
        for wave in WAVES:
            requests = PROMPTS[: len(wave[rank])]
            outputs = llm.generate(requests, greedy(wave[rank]), use_tqdm=False)
            tokens.append(completions(outputs))
        [reported] = llm.collective_rpc(report)
        return {"tokens": tokens, "counts": counted(llm), **reported}


def generate_on_both(target: str, draft: str) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        port = free_port()
        replicas = [
            pool.submit(generate_on_replica, rank, port, target, draft) for rank in range(2)
        ]
        return [replica.result() for replica in replicas]


@needs_two_cores
def test_replicas_in_lock_step_give_the_tokens_of_one_plain_engine(tmp_path: Path) -> None:
    target, draft = save_mixture_pair(tmp_path)
    found = call_on_gpu(generate_on_both, tmp_path, target=target, draft=draft)
    with running(None, model=target, skip_tokenizer_init=True) as llm:
        longest = completions(llm.generate(PROMPTS, greedy([12, 12]), use_tqdm=False))
    for rank, replica in enumerate(found):
        assert replica["tokens"] == [
            [[tokens[:number]] for number, [tokens] in zip(wave[rank], longest, strict=False)]
            for wave in WAVES
        ]
        assert replica["counts"]["accepted_tokens"] > 0
        assert replica["idle steps"] > 0  # beside one that drafts
        assert replica["TreeGraphManager"] > 0
        assert replica["DraftGraphs"] > 0
    assert found[0]["counts"]["drafts"] != found[1]["counts"]["drafts"]
