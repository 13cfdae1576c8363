"""Compares methods side by side, then serves arrivals with each; every figure is kept at once."""

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import GpuRunError
from benchmarks.gpu.rival.side_by_side import open_side_by_side
from benchmarks.gpu.sizes import ON_A_GPU
from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.report import run_bench
from sequoia_vllm.measuring.interrupts import engines_end_here

_BATCHED_TOKENS = 4096  # bench would ask for 8,256: four engines share the device's memory
_SHOWN = ("rate", "ttft_ms", "tpot_ms", "e2e_ms", "mixed", "decoding", "steps_by_drafts")


def compare_side_by_side(
    settings: BenchSettings,
    questions: Sequence[list[int]],
    rates: Sequence[float],
    arriving: float,
    out: Path,
) -> None:
    """Writes a line of ``bench.jsonl`` for each case, and of ``arrivals.jsonl``. Raises GpuRunError
    at the end if an engine, a case or arrivals failed."""
    failed: list[str] = []
    out.mkdir(parents=True, exist_ok=True)
    sizes = replace(ON_A_GPU, arriving=arriving, arriving_tokens=settings.max_tokens)
    options = {**settings.engine_options(), "max_num_batched_tokens": _BATCHED_TOKENS}
    opened = open_side_by_side(settings.methods, settings.engine, options, _report)
    with engines_end_here(), opened as engines:
        methods = tuple(engine.method for engine in engines.values())
        failed += [one.name for one in settings.methods if one not in methods]
        for case in settings.cases:
            one = replace(
                settings, methods=methods,
                temperatures=(case.temperature,), batch_sizes=(case.batch_size,),
            )  # fmt: skip
            with _attempt(f"T={case.temperature:g}, batch {case.batch_size}", failed):
                _compare(one, engines, out / "bench.jsonl")
        for rate in rates:
            for name, engine in engines.items():
                with _attempt(f"{name}, {rate:g} requests/s", failed):
                    found = engine.arrivals(list(questions), rate, sizes)
                    _keep(out / "arrivals.jsonl", {"method": name, **found})
                    print("RESULT", name, {key: found[key] for key in _SHOWN}, flush=True)
    if failed:
        raise GpuRunError(f"failed, as the log says: {'; '.join(failed)}")


def _compare(settings: BenchSettings, engines: dict[str, Any], file: Path) -> None:
    described = {"max_tokens": settings.max_tokens, "rounds": settings.rounds}
    report = run_bench(settings, described, _report, lambda *ignored: nullcontext(engines))
    _keep(file, report.to_dict())
    for row in report.results:
        print(_line(row), flush=True)


def _keep(file: Path, found: dict[str, Any]) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(found) + "\n")


@contextmanager
def _attempt(what: str, failed: list[str]) -> Iterator[None]:
    """An error ends this part alone, which is noted: time on a GPU is short."""
    try:
        yield
    except Exception:
        failed.append(what)
        print(f"FAILED {what}", flush=True)
        traceback.print_exc()


def _report(what: str, done: int, total: int) -> None:
    print(f"{what} ({done} of {total})", flush=True)


def _line(row: Any) -> str:
    spread = row.speedup
    parts = {key: round(1e3 * value, 2) for key, value in row.split.model_dump().items()}
    return (
        f"RESULT T={row.temperature:g} batch {row.batch_size} {row.method}: "
        f"{row.tokens_per_second.median:.1f} tokens/s, {spread.median:.3f}x "
        f"({spread.low:.3f} to {spread.high:.3f}), {row.tokens_per_step:.3f} tokens/step, "
        f"{1e3 * row.step_seconds:.2f} ms {parts}"
    )
