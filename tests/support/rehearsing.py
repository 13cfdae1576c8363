"""Engines of the rehearsal: tiny models, and what users get where they set nothing else."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.hardware import graph_sizes
from tests.support.engines import noting, runner_of, running
from tests.support.generating import completions, counted, joined

# float32, since tokens are compared; the rest is what the models need.
DEFAULTS = {
    "enforce_eager": False, "kv_cache_memory_bytes": None, "max_model_len": 256, "max_num_seqs": 3,
    "skip_tokenizer_init": True,
}  # fmt: skip


@contextmanager
def rehearsing(
    config: dict | None, *, as_users_start: bool = False, **options: Any
) -> Iterator[Any]:
    """An engine on the stand-in GPU (see `tests.support.engines.running`).

    `as_users_start`: with the graphs on trial and the warm-up that take half of a start here.
    """
    from gpu_stand_in.vllm_parts import QUICK_START

    with (
        patch.dict(os.environ, {} if as_users_start else {QUICK_START: "1"}),
        running(config, **{**DEFAULTS, **options}) as llm,
    ):
        yield llm


def since(before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Graphs captured and replayed since `graphs.report()` gave `before`."""
    from gpu_stand_in import graphs

    return {
        what: {kind: number - before[what].get(kind, 0) for kind, number in numbers.items()}
        for what, numbers in graphs.report().items()
    }


@contextmanager
def counting_eager() -> Iterator[dict[str, list[int]]]:
    """What runs without a graph within the block, by the requests of each pass.

    Trees that grow, and committed tokens that the draft reads.
    """
    from gpu_stand_in import graphs

    from sequoia_vllm.drafting.growth import TreeGrowth

    def eager(_: Any, requests: int, *args: Any) -> int | None:
        return requests if graphs.capturing() is None else None

    with (
        noting(TreeGrowth, "grow", eager) as growth,
        noting(TreeGrowth, "committed_inputs", eager) as reads,
    ):
        yield {"eager growth": growth, "eager reads": reads}


def counting_read_rows(speculator: Any) -> Any:
    """Rows of each read from a graph within the block: those that were needed, and the graph's."""
    rows = speculator.batch.first_rows
    return noting(
        speculator._reader.graphs, "run_fullgraph",
        lambda shape: (int(rows[-1]), shape.num_tokens),
    )  # fmt: skip


def noting_modes(runner: Any) -> Any:
    """How the target runs each step with trees within the block, and if it also reads prompts."""

    def mode_of(batch: Any, mode: Any, *args: Any) -> str | None:
        if not batch.num_draft_tokens:
            return None
        return mode.name + (" beside prompts" if batch.is_prefilling_np.any() else "")

    return noting(runner.model_state, "prepare_attn", mode_of)


@contextmanager
def flash_reads(rows: int, product: int) -> Iterator[None]:
    """Engines that start within the block have this `ContextRule`, as if a GPU had run it."""
    rule = graph_sizes.ContextRule(rows, product)
    with patched(graph_sizes, "usual_rule", lambda _on_cpu: rule):
        yield


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
    found: set[tuple[str, str]] = set()
    original = InterpretedFunction.run

    @cache
    def binder_of(kernel: Any) -> tuple[list[str], Callable]:
        compiled = JITFunction(kernel.fn, **kernel.kwargs)
        constants = [param.name for param in compiled.params if param.is_constexpr]
        return constants, create_function_from_signature(
            compiled.signature, compiled.params, backend
        )

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("sequoia_vllm"):
            constants, bind = binder_of(self)
            bound, specialization, options = bind(*args, **kwargs)
            key = [(name, bound[name]) for name in constants]
            found.add((self.fn.__name__, repr((key, specialization, sorted(options.items())))))
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    with patched(InterpretedFunction, "run", run):
        yield found


def generate(llm: Any, requests: list[Any], params: Any) -> dict[str, Any]:
    """Tokens of all requests, and the graphs that were replayed for them."""
    from gpu_stand_in import graphs

    before = graphs.report()
    with counting_eager() as eager:
        tokens = completions(llm.generate(requests, params, use_tqdm=False))
    return {"tokens": tokens, "graphs": since(before)["replayed"], **eager}


def plain_and_trees(
    config: dict, model: str, texts: list[Any], params: Any, **options: Any
) -> dict[str, Any]:
    """Answers of plain vLLM, and of trees for the whole batch and for its first request."""
    with rehearsing(None, model=model, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, texts, params)}
    with rehearsing(config, model=model, **options) as llm:
        answers["trees"] = generate_with_trees(llm, texts, params)
        answers["alone"] = generate_with_trees(llm, texts[:1], params)
    return answers


def check_replayed(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Tokens are plain vLLM's, and graphs ran all of the draft, and the target's tree steps."""
    assert found["tokens"] == plain["tokens"][: len(found["tokens"])]
    assert found["eager growth"] == found["eager reads"] == []
    assert found["graphs"]["DraftGraphs"] >= found["counts"]["steps"] - 3
    assert found["graphs"]["TreeGraphManager"] >= found["counts"]["steps"] - 3


def generate_with_trees(llm: Any, requests: list[Any], params: Any) -> dict[str, Any]:
    """`generate`, with what became of the trees."""
    return {**generate(llm, requests, params), "counts": counted(llm)}


def join_and_abort(
    llm: Any, requests: list[Any], params: list[Any], aborted: int
) -> dict[str, Any]:
    """One request more every other step; one is aborted while others run."""
    with (
        counting_eager() as eager,
        counting_read_rows(runner_of(llm).speculator) as rows,
        noting_modes(runner_of(llm)) as modes,
    ):
        tokens = joined(llm, requests, params, aborted)
    counts = {"counts": counted(llm), "modes": Counter(modes), "read rows": rows}
    return {"tokens": tokens, **counts, **eager}
