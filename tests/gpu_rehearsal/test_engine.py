"""vLLM's GPU engine with trees, as users start it: from start-up to replayed graphs."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm import SamplingParams

from sequoia_vllm.measuring.step_recorder import EXTENSION
from tests.support.calling import called_once
from tests.support.engines import noting, runner_of, sequoia
from tests.support.generating import random_prompts, save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.rehearsing import (
    flash_reads,
    generate,
    generate_with_trees,
    recording_versions,
    rehearsing,
    since,
)

pytestmark = pytest.mark.engine

PIECE = "CUDAGraphWrapper"  # of a model that is cut at its attention layers
LENGTHS = [9, 18, 13]
TOKENS = 10
EDITS = {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "_bad_words_token_ids": [[7], [8, 9]]}


def sampled(temperature: float = 0.8, **options: Any) -> Any:
    common = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    return SamplingParams(temperature=temperature, **common, **options)


def start_and_generate(models: str) -> dict[str, Any]:
    """Answers of plain vLLM and of trees: batches of every size, and one with FlashAttention."""
    from gpu_stand_in import flash_attention, graphs

    target, draft = save_related_pair(Path(models))
    requests = random_prompts(LENGTHS)
    with rehearsing(None, model=target) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, requests, sampled(0))}
    before = graphs.report()
    with (
        recording_versions() as kernels,
        rehearsing(sequoia(size=8, depth=3, draft=draft), as_users_start=True, model=target) as llm,
    ):
        answers["start"] = since(before)
        answers["held"] = [len(held.graphs) for held in draft_graphs(llm)]
        answers["orders"] = [
            [shape.num_tokens for shapes in held._capture_descs.values() for shape in shapes]
            for held in draft_graphs(llm)
        ]
        answers["untried"] = untried(llm)
        started = set(kernels)
        answers["settings"] = settings(llm)
        for batch in (3, 2, 1):
            answers[str(batch)] = generate_with_trees(llm, requests[:batch], sampled(0))
        for batch in (3, 1):
            for params in (sampled(), sampled(top_k=20), sampled(seed=3), sampled(**EDITS)):
                generate(llm, requests[:batch], params)
        answers["late"] = sorted(kernels - started)
        answers["in time"] = sorted({name for name, _ in started})
    flash = sequoia(size=8, depth=3, draft=draft, verification="traversal")
    flash_attention.attended.clear()
    with (
        flash_reads(rows=8, product=8 * 50),  # which the three requests reach while they run
        recording_versions() as kernels,
        rehearsing(flash, as_users_start=True, model=target, worker_extension_cls=EXTENSION) as llm,
    ):
        started = set(kernels)
        llm.collective_rpc("sequoia_record_steps")
        target_graphs = runner_of(llm).cudagraph_manager
        with noting(target_graphs, "run_fullgraph", lambda shape: type(shape).__name__) as twins:
            answers["flash"] = generate_with_trees(llm, requests, sampled(0))
        answers["steps"] = llm.collective_rpc("sequoia_take_steps", args=(len(requests),))[0]
        generate(llm, requests[:2], sampled())
        generate(llm, requests[:1], sampled(top_k=20))
        generate(llm, requests[:2], sampled(**EDITS))
        answers["late by traversal"] = sorted(kernels - started)
        answers["in time by traversal"] = sorted({name for name, _ in started})
    answers["flash"] |= {"twins": Counter(twins), "over contexts": flash_attention.attended[False]}
    return answers


def draft_graphs(llm: Any) -> list[Any]:
    speculator = runner_of(llm).speculator
    return [speculator._reader.graphs, *speculator._graphs.values()]


def untried(llm: Any) -> int:
    """Bytes of all graphs that grow trees but the two on trial, of which the second took 3 MiB."""
    _, growth = draft_graphs(llm)
    tried = dict(list(growth.graphs.items())[:2])
    with (
        patch.object(growth, "graphs", tried),
        patch.object(growth, "_capture_mem_samples", [9 << 20, 3 << 20]),
    ):
        return growth.untried_bytes


def settings(llm: Any) -> dict[str, Any]:
    """What the engine runs with where the user has set nothing."""
    config = llm.llm_engine.vllm_config
    return {
        "runner": type(runner_of(llm)).__name__,
        "attention": runner_of(llm).attn_groups[0][0].backend.__name__,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "asynchronous": config.scheduler_config.async_scheduling,
        "prefix caching": config.cache_config.enable_prefix_caching,
        "cache bytes": config.cache_config.kv_cache_memory_bytes,
        "eager": config.model_config.enforce_eager,
    }


generated = called_once(call_on_gpu, start_and_generate)


def test_the_engine_starts_with_the_defaults_of_gpus(generated):
    assert generated["settings"] == {
        "runner": "SequoiaGPUModelRunner",
        "attention": "FlashTreeBackend",
        "graphs": "FULL_AND_PIECEWISE",
        "asynchronous": True,
        "prefix caching": True,
        "cache bytes": None,
        "eager": False,
    }


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_tokens_are_those_of_plain_vllm_from_graphs(batch, generated):
    """Also in batches of odd sizes. One of the target's reads all prompts, as they are short."""
    found = generated[str(batch)]
    assert found["tokens"] == generated["plain"]["tokens"][:batch]
    assert found["counts"]["tokens_per_tree"] > 1.5
    assert found["graphs"]["DraftGraphs"] >= 3
    assert found["graphs"]["TreeGraphManager"] >= 4
    assert found["graphs"].get(PIECE, 0) == 0
    assert found["eager growth"] == found["eager reads"] == []


def test_flash_attention_reads_contexts_with_the_defaults_of_gpus(generated):
    """Once they are long, in graphs of their own; the target has one layer."""
    found = generated["flash"]
    assert found["tokens"] == generated["plain"]["tokens"]
    assert found["counts"]["tokens_per_tree"] > 1.5
    assert found["eager growth"] == []
    assert found["twins"]["LongBatch"] > 1
    assert found["twins"]["BatchExecutionDescriptor"] > 1
    assert found["over contexts"] >= found["twins"]["LongBatch"]


def test_start_captures_all_graphs_and_few_of_the_drafts_on_trial(generated):
    """Two of those that read, and two of those that grow: vLLM profiles their memory."""
    captured, held = generated["start"]["captured"], generated["held"]
    assert min(captured[kind] for kind in ("TreeGraphManager", PIECE)) > 0
    assert min(held) > 2
    assert captured["DraftGraphs"] == sum(held) + 2 * 2
    # The largest first: what is tried stands for all.
    assert generated["orders"] == [sorted(order, reverse=True) for order in generated["orders"]]
    assert generated["untried"] == (held[1] - 2) * (3 << 20)


def test_no_request_is_the_first_to_need_a_kernel(generated):
    """A GPU would compile it while the request waits."""
    assert "target_statistics_kernel" in generated["in time"]
    assert "wave_kernel" in generated["in time by traversal"]
    assert generated["late"] == generated["late by traversal"] == []


def test_bench_and_profile_can_time_its_steps(generated):
    """Steps are of the batch of all requests; some of its last trees are cut short."""
    full = [step for step in generated["steps"] if step["fewest"] == 8]
    assert len(full) > 1
    assert all(step["target"] > 0 and step["drafting"] > 0 for step in full)
    assert all(len(step["passes"]) == 3 for step in full)
