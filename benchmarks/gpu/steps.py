"""Step times inside one engine: by batch and drafts, with prompts, by kernels."""

from functools import partial
from itertools import product
from typing import Any

from benchmarks.gpu.engine import Engine, sampling, started
from benchmarks.gpu.item_run import ItemRun
from benchmarks.gpu.serving import measure_arrivals
from benchmarks.gpu.step_parts import compact, steady, times_of
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.hardware import graph_sizes
from sequoia_vllm.hardware.graph_sizes import ContextRule

LONG_HEAD = 40000
"""Positions of a head for long contexts: the published one ends at 2,048."""
_WARM_UP = 4  # steps, prompts included


def speculation(batches: tuple[int, ...], drafts: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Keys of ``speculative_config`` with which these numbers of drafts have graphs at all sizes
    up to 1,024 tokens.

    Batches above the largest never come. They put each number into the schedule, and an engine that
    adapts captures a number of the schedule for all batch sizes.
    """
    largest, most = drafts[-1], batches[-1]
    smaller = enumerate(reversed(drafts[:-1]), start=most + 1)
    return {
        "tree": {"size": largest + 1},
        "adapt": True,
        "num_speculative_tokens_per_batch_size": [
            (1, most, largest),
            *((batch, batch, number) for batch, number in smaller),
        ],
        **more,
    }


def time_trees(run: ItemRun, pair: str, ranks: str = "1", **keys: str) -> None:
    """A pair with trees of each size.

    Args:
        ranks: GPUs that share each layer.
        keys: More of ``speculative_config``; with "drafter" there is no model that drafts.
    """
    sizes = run.sizes
    options = {"max_num_seqs": sizes.batches[-1] + len(sizes.drafts) - 1}
    if (count := int(ranks)) > 1:
        options["tensor_parallel_size"] = count
    speculative = speculation(sizes.batches, sizes.drafts, **keys)
    with started(run, pair, speculative, **options) as engine:
        tree = SequoiaSettings.of(engine.vllm_config).tree
        run.record("trees", {"parents": list(tree.parents)})
        for batch, number in product(sizes.batches, sizes.drafts):
            work = partial(time_steps, engine, batch, number, sizes.context)
            run.measure(f"batch {batch}, {number} drafts", work)
        for number in sizes.some_drafts:
            run.measure(f"prompts, {number} drafts", partial(time_mixed, engine, number))
        for number in sizes.some_drafts:
            run.measure(f"kernels, {number} drafts", partial(time_kernels, engine, number))


def time_plain(run: ItemRun, pair: str) -> None:
    """The pair's target alone."""
    sizes = run.sizes
    with started(run, pair, None, max_num_seqs=sizes.batches[-1] + 3) as engine:
        for batch in sizes.batches:
            work = partial(time_steps, engine, batch, 0, sizes.context)
            run.measure(f"batch {batch}, 0 drafts", work)
        run.measure("prompts, 0 drafts", partial(time_mixed, engine, 0))
        run.measure("kernels, 0 drafts", partial(time_kernels, engine, 0))
        measure_arrivals(run, engine, "plain")


def time_contexts(run: ItemRun, pair: str, kernel: str) -> None:
    """Trees over contexts of each length; ``kernel`` is of the target's attention over them."""
    sizes = run.sizes
    batches, drafts = sizes.batches[:2], sizes.drafts[-2:]
    rule = ContextRule(0, 0) if kernel == "flash" else None
    speculative = speculation(batches, drafts)
    with (
        patched(graph_sizes, "usual_rule", lambda _on_cpu: rule),
        started(
            run, pair, speculative, head_positions=LONG_HEAD, max_num_seqs=batches[-1] + 1
        ) as engine,
    ):
        for context, batch, number in product(sizes.contexts, batches, drafts):
            if batch * context <= sizes.most_context_tokens and number > 0:
                work = partial(time_steps, engine, batch, number, context)
                run.measure(f"batch {batch}, {number} drafts, context {context}", work)


def time_steps(engine: Engine, batch: int, drafts: int, context: int) -> dict[str, Any]:
    """Steps in which every request scores its whole tree; the last round counts.

    ``context`` is the prompts' length. They are found in the prefix cache from the second round on.
    """
    tokens = engine.sizes.tokens
    engine.limit(drafts)
    prompts = [engine.prompt(context) for _ in range(batch)]
    for _ in range(engine.sizes.rounds):
        engine.take_steps()
        engine.generate(prompts, tokens)
    records = engine.take_steps()
    is_steady = steady(batch, drafts + 1)
    return {
        "batch": batch,
        "drafts": drafts,
        "context": context + tokens // 2,
        **times_of(records, is_steady, is_steady),
        "records": compact(records),
    }


def time_mixed(engine: Engine, drafts: int) -> dict[str, Any]:
    """Steps that also read a prompt, in about every second one, beside some decoders."""
    engine.limit(drafts)
    sizes = engine.sizes
    batch, length = sizes.beside, sizes.prompt
    requests = _decoders(engine, batch, sizes.outputs)
    for number in range(sizes.outputs):
        engine.step()
        if number % 2:
            requests.append(engine.add(engine.prompt(length), sampling(1)))
    records = _ended(engine, requests)
    return {
        "batch": batch, "drafts": drafts, "prompt": length,
        "decoding": times_of(records, steady(batch, drafts + 1)),
        "mixed": times_of(records, lambda r: not r["decoding"] and r["requests"] > batch),
    }  # fmt: skip


def time_kernels(engine: Engine, drafts: int) -> dict[str, Any]:
    """What the device's kernels take of one request's step: the rest of it the device waits."""
    engine.limit(drafts)
    outputs = engine.sizes.outputs // 4
    requests = _decoders(engine, 1, outputs)
    engine.llm.collective_rpc("gpu_start_profiler")
    for _ in range(outputs):
        engine.step()
    found = engine.llm.collective_rpc("gpu_stop_profiler")[0]
    _ended(engine, requests)
    steps = max(1, found["steps"])
    kernels = [
        [name, round(ms / steps, 4), round(calls / steps, 1)]
        for name, ms, calls in found["kernels"]
    ]
    busy = round(found["busy_ms"] / steps, 4)
    return {"batch": 1, "drafts": drafts, "steps": steps, "busy_ms": busy, "kernels": kernels}


def _decoders(engine: Engine, batch: int, steps: int) -> list[str]:
    """Adds requests that run for at least so many steps from now on: they are warm, and the steps
    up to here are dropped."""
    params = sampling(engine.sizes.tokens_for(_WARM_UP + steps))
    requests = [engine.add(engine.prompt(engine.sizes.prompt), params) for _ in range(batch)]
    for _ in range(_WARM_UP):
        engine.step()
    engine.take_steps()
    return requests


def _ended(engine: Engine, requests: list[str]) -> list[dict[str, Any]]:
    """Steps up to now; then the requests are aborted."""
    records = engine.take_steps()
    engine.abort(requests)
    engine.drain()
    return records
