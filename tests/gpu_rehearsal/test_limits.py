"""What the GPU engine's limits allow: requests at once, and logits while it starts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from sequoia_vllm.engine.common.patched import patched
from tests.support.engines import noting, runner_of, scheduler_of, sequoia
from tests.support.generating import VOCAB, random_prompts
from tests.support.heads import save_dflash
from tests.support.interpreted import call_on_gpu
from tests.support.models import save_llama
from tests.support.rehearsing import generate, rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

REQUESTS, NODES, TOKENS = 6, 8, 5


def run_many(models: str) -> dict[str, Any]:
    """Six requests with a DFlash head, where four trees' nodes fill a step."""
    target = str(save_llama(Path(models) / "target", seed=3, vocab_size=6))
    config = sequoia(
        size=NODES,
        depth=3,
        draft=save_dflash(Path(models) / "head", target),
        num_speculative_tokens_per_batch_size=[[1, 1, NODES - 1], [2, REQUESTS, 0]],
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    limits = {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 4 * NODES, "max_model_len": 64}
    with rehearsing(config, as_users_start=True, model=target, **limits) as llm:
        scheduler, requests = scheduler_of(llm), random_prompts([3] * REQUESTS, vocab=6)
        with noting(
            scheduler, "schedule", lambda step: len(step.num_scheduled_tokens), of_result=True
        ) as together:
            generate(llm, requests, params)
        return {"together": max(together), "limit": scheduler.scheduler_config.max_num_active_seqs}


def start(models: str) -> dict[str, Any]:
    """An engine with many request slots, of which a few may have whole trees.

    Then requests run to the longest that may be: their last trees are trimmed to any size. In
    half precision tiles of the tree attention kernel differ by it.
    """
    sizes = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 1}
    target = str(save_llama(Path(models) / "target", seed=3, **sizes))
    # With heads of another size: what it compiles is of no use to the target.
    draft = str(save_llama(Path(models) / "draft", seed=4, **sizes, head_dim=16))
    schedule = [[1, 4, NODES - 1], [5, 32, 0]]
    config = sequoia(
        size=NODES, depth=3, draft=draft, num_speculative_tokens_per_batch_size=schedule
    )
    with (
        watching_logits() as (scored, profiled),
        recording_versions() as versions,
        rehearsing(
            config,
            as_users_start=True,
            model=target,
            max_num_seqs=32,
            dtype="float16",
            max_model_len=64,
        ) as llm,
    ):
        slots = runner_of(llm).scheduler_config.max_num_seqs
        found = {"scored": list(scored), "profiled": profiled, "slots": slots}
        scored.clear()
        at_start = set(versions)
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        for lengths in ([52, 40], [57], [5, 60, 45]):
            generate(llm, random_prompts(lengths), params)
    return {**found, "sizes": sorted(set(scored)), "late": sorted(versions - at_start)}


@contextmanager
def watching_logits() -> Iterator[tuple[list[int], list[int]]]:
    """Rows of the target's logits: of each step within the block, and as profiled."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # the stand-ins, without which the modules below find no GPU
    from sequoia_vllm.engine.v2.drafting import proposer
    from sequoia_vllm.engine.v2.runner import TreeRunner

    def scored_rows(runner: Any, hidden_states: Any, batch: Any, *_: Any) -> int:
        return len(batch.logits_indices)

    with (
        noting(proposer, "take_logits_memory", lambda rows, *_: rows) as profiled,
        noting(TreeRunner, "sample", scored_rows) as scored,
    ):
        yield scored, profiled


@contextmanager
def recording_versions() -> Iterator[set[tuple[str, str]]]:
    """Versions of our kernels that an H100 would compile for what is launched or captured within.

    A kernel's name, and what Triton compiles it by: constants, types, alignment, options.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders: dict[Callable, tuple[list[str], Callable]] = {}
    found: set[tuple[str, str]] = set()
    original = InterpretedFunction.run

    def binder_of(kernel: Any) -> tuple[list[str], Callable]:
        if kernel.fn not in binders:
            compiled = JITFunction(kernel.fn, **kernel.kwargs)
            constants = [param.name for param in compiled.params if param.is_constexpr]
            bind = create_function_from_signature(compiled.signature, compiled.params, backend)
            binders[kernel.fn] = constants, bind
        return binders[kernel.fn]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("sequoia_vllm"):
            constants, bind = binder_of(self)
            bound, specialization, options = bind(*args, **kwargs)
            key = [(name, bound[name]) for name in constants]
            found.add((self.fn.__name__, repr((key, specialization, sorted(options.items())))))
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    with patched(InterpretedFunction, "run", run):
        yield found


def test_a_head_that_drafts_blocks_limits_no_requests(tmp_path):
    assert call_on_gpu(run_many, tmp_path, models=str(tmp_path)) == {
        "together": REQUESTS,
        "limit": None,
    }


def test_a_start_computes_no_more_logits_than_were_profiled_and_compiles_all_kernels(tmp_path):
    found = call_on_gpu(start, tmp_path, models=str(tmp_path))
    assert max(found["profiled"]) == 4 * NODES
    assert 2 * NODES <= max(found["scored"]) <= max(found["profiled"])
    assert found["slots"] == 32
    assert {2, 3, 4, 5} <= set(found["sizes"])  # rows of one request with a trimmed tree
    assert found["late"] == []
