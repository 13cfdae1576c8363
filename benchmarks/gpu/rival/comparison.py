"""Compares methods side by side, then serves arrivals with each; every figure is kept at once.

Engines start at once, each in a process of its own.
"""

import json
import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import EXTENSION, Engine
from benchmarks.gpu.results import GpuRunError
from benchmarks.gpu.serving import serve_arrivals
from benchmarks.gpu.sizes import ON_A_GPU, Sizes
from sequoia_vllm.bench.engines import BenchEngine, check_runner, speculative_config
from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.methods import BenchError, Method
from sequoia_vllm.bench.report import run_bench
from sequoia_vllm.cli.bench import print_report
from sequoia_vllm.measuring.engines import EngineSpec, open_engine
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
    opened = open_side_by_side(settings.methods, settings.engine, options)
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
    print_report(report)


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


# -- engines -------------------------------------------------------------------------


class RemoteEngine:
    """A `BenchEngine` in another process: it has the same attributes."""

    def __init__(self, method: Method, pipe: Any) -> None:
        self.method = method
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        if isinstance(getattr(_Served, name), property):
            return self._ask(name)
        return lambda *arguments: self._ask(name, *arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self.answer()

    def answer(self) -> Any:
        """What the process says next."""
        try:
            found, error = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise BenchError(f"the engine of {self.method.name} has ended") from None
        if error is not None:
            raise BenchError(f"{self.method.name}: {error}")
        return found


class _Served(BenchEngine):
    """What a process answers."""

    def arrivals(self, prompts: list[list[int]], rate: float, sizes: Sizes) -> dict[str, Any]:
        """`serve_arrivals` with these prompts in turn."""
        return serve_arrivals(_TextEngine(self._llm, sizes, prompts), rate)


class _TextEngine(Engine):
    """An engine whose prompts are given."""

    def __init__(self, llm: Any, sizes: Sizes, prompts: list[list[int]]) -> None:
        super().__init__(llm, sizes)
        self._prompts = cycle(prompts)

    def prompt(self, length: int) -> dict[str, list[int]]:
        """The next one."""
        return {"prompt_token_ids": next(self._prompts)}


@contextmanager
def open_side_by_side(
    methods: Sequence[Method], spec: EngineSpec, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """As `bench.engines.open_engines`, with all engines started at once."""
    context = multiprocessing.get_context("spawn")
    engines: dict[str, Any] = {}
    for method in methods:
        mine, its = context.Pipe()
        # Not a daemon: vLLM's engine is a process of this one.
        context.Process(target=_serve, args=(its, method, spec, options)).start()
        its.close()
        engines[method.name] = RemoteEngine(method, mine)
    try:
        for number, (name, engine) in enumerate(list(engines.items())):
            try:
                _report(f"started {engine.answer()}", number, len(methods))
            except BenchError as error:
                del engines[name]  # the others are compared without it
                print(f"FAILED {error}", flush=True)
        yield engines
    finally:
        for engine in engines.values():
            engine._pipe.close()


def _serve(pipe: Any, method: Method, spec: EngineSpec, options: dict[str, Any]) -> None:
    options = {**options, **method.engine_options, "worker_extension_cls": EXTENSION}
    try:
        config = speculative_config(method, spec)
        with open_engine(spec, speculative_config=config, **options) as llm:
            engine = _Served(method, llm)
            check_runner(engine)
            pipe.send((f"{method.name}, tree {engine.tree}", None))
            while True:
                name, arguments = pipe.recv()
                found = getattr(engine, name)
                pipe.send((found(*arguments) if callable(found) else found, None))
    except EOFError:
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send((None, f"{type(error).__name__}: {error}"))
