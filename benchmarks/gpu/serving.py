"""Requests that come while others run: adaptation, and what vLLM's monitors say meanwhile."""

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any

from benchmarks.gpu.engine import Engine, sampling, started
from benchmarks.gpu.item_run import ItemRun
from benchmarks.gpu.step_parts import Record, times_of

_EDITS = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {7: 1.0}}
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.05},
    {"temperature": 1.0, "seed": 5, **_EDITS},
    {"logprobs": 3},
)
MONITORS = {
    "waits": re.compile(r"sync detected|called a synchronizing CUDA operation", re.IGNORECASE),
    "compilations": re.compile(r"during inference"),
}
"""What lines of the log tell of each."""
_MOST_LINES = 15


def adapt(run: ItemRun, pair: str) -> None:
    """An engine with all defaults, as it adapts while requests arrive, then with fixed drafts."""
    with started(run, pair, _speculative(run)) as engine:
        measure_arrivals(run, engine, "adapting")
        for drafts in reversed(run.sizes.some_drafts):
            engine.limit(drafts)  # also where an earlier run has some of what follows
            measure_arrivals(run, engine, f"{drafts} drafts")


def _speculative(run: ItemRun) -> dict[str, Any]:
    """All defaults; a rehearsal captures fewer graphs."""
    return {"tree": {"size": run.sizes.drafts[-1] + 1}} if run.tiny else {}


def measure_arrivals(run: ItemRun, engine: Engine, how: str) -> None:
    """Requests that arrive at random, at each rate; ``how`` drafts are chosen meanwhile."""
    for rate in run.sizes.rates:
        run.measure(f"{rate:g} requests/s, {how}", partial(serve_arrivals, engine, rate))


def serve_arrivals(engine: Engine, rate: float) -> dict[str, Any]:
    """Open-loop requests at ``rate`` a second (Poisson), all greedy and of one length."""
    drawn = random.Random(23)
    prompt, tokens = engine.sizes.prompt, engine.sizes.arriving_tokens
    count = round(rate * engine.sizes.arriving)
    arrivals = [0.0]
    while len(arrivals) < count:
        arrivals.append(arrivals[-1] + drawn.expovariate(rate))
    first: dict[str, float] = {}
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    engine.take_steps()
    start = time.perf_counter()
    while arrivals or engine.is_busy:
        while arrivals and time.perf_counter() - start >= arrivals[0]:
            due = start + arrivals.pop(0)
            begun[engine.add(engine.prompt(prompt), sampling(tokens))] = due
        if not engine.is_busy:
            time.sleep(max(0.0, start + arrivals[0] - time.perf_counter()))
            continue
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter())
            if output.finished:
                ended[output.request_id] = time.perf_counter()
    seconds = time.perf_counter() - start
    records = [record for record in engine.take_steps() if record["requests"]]
    drafts, late = (
        Counter(record["most"] - 1 for record in part if record["decoding"])
        for part in (records, records[len(records) // 2 :])
    )
    return {
        "rate": rate, "requests": count, "seconds": round(seconds, 3),
        "tokens_per_second": round(count * tokens / seconds, 1),
        "ttft_ms": round(1e3 * mean(first[r] - begun[r] for r in begun), 2),
        "tpot_ms": round(1e3 * mean((ended[r] - first[r]) / (tokens - 1) for r in begun), 3),
        "e2e_ms": round(1e3 * mean(ended[r] - begun[r] for r in begun), 1),
        "mixed": _times(records, lambda record: not record["decoding"] and record["requests"] > 2),
        "decoding": _times(records, lambda record: record["decoding"]),
        "median_batch": median(record["requests"] for record in records),
        "steps_with_prompts": sum(not record["decoding"] for record in records),
        "steps_by_drafts": dict(drafts.most_common()),
        "steps_by_drafts_of_the_second_half": dict(late.most_common()),
    }  # fmt: skip


def _times(records: list[Record], is_wanted: Callable[[Record], bool]) -> dict[str, float] | None:
    """Times of the steps that are wanted; None: there are none."""
    try:
        return times_of(records, is_wanted)
    except ValueError:
        return None


def watch(run: ItemRun, pair: str) -> None:
    """Counts what vLLM's monitors write while requests of all kinds come, end and are aborted."""
    limits: dict[str, Any] = {
        "max_num_seqs": max(3, *run.sizes.watched),
        "max_model_len": run.sizes.longest,
        "gpu_memory_utilization": 0.5,  # times do not matter: something else may run beside it
    }
    with started(run, pair, _speculative(run), **limits) as engine:
        kinds: dict[str, Callable[[Engine], None]] = {
            "greedy and sampled together": _serve_all_kinds,
            "aborted": _abort_some,
            "ends at the model's length": _end_by_length,
        }
        for name, serve in kinds.items():
            run.measure(name, partial(_watched, run, engine, serve))


def _watched(run: ItemRun, engine: Engine, serve: Callable[[Engine], None]) -> dict[str, Any]:
    before = len(run.log_lines())
    serve(engine)
    lines = run.log_lines()[before:]
    found: dict[str, Any] = {}
    for monitor, pattern in MONITORS.items():
        texts = Counter(line[-250:] for line in lines if pattern.search(line))
        found[monitor] = sum(texts.values())
        found[f"lines of {monitor}"] = texts.most_common(_MOST_LINES)
    return found


def _serve_all_kinds(engine: Engine) -> None:
    tokens = engine.sizes.arriving_tokens
    for batch in engine.sizes.watched:
        for turn in range(0, len(_SAMPLINGS), 2):
            for place in range(batch):
                params = sampling(tokens + place, **_SAMPLINGS[(turn + place) % len(_SAMPLINGS)])
                engine.add(engine.prompt(5 + 3 * place), params)
            engine.drain()


def _abort_some(engine: Engine) -> None:
    params = sampling(engine.sizes.tokens_for(6))
    requests = [engine.add(engine.prompt(9), params) for _ in range(3)]
    for request in requests[1:]:
        for _ in range(3):
            engine.step()
        engine.abort([request])
    engine.abort(requests)
    engine.drain()


def _end_by_length(engine: Engine) -> None:
    """Trees are trimmed where little room is left below the model's longest length."""
    longest = engine.vllm_config.model_config.max_model_len
    for room in (12, 7):  # tokens
        engine.add(engine.prompt(longest - room), sampling(room))
    engine.drain()
