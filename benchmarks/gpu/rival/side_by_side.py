"""Engines of a comparison that start at once, each in a process of its own."""

import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from benchmarks.gpu.engine import EXTENSION, Engine
from benchmarks.gpu.serving import serve_arrivals
from benchmarks.gpu.sizes import Sizes
from sequoia_vllm.bench.engines import BenchEngine, check_runner, speculative_config
from sequoia_vllm.bench.methods import BenchError, Method
from sequoia_vllm.measuring.engines import EngineSpec, Progress, open_engine


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
    methods: Sequence[Method], spec: EngineSpec, options: dict[str, Any], progress: Progress
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
                progress(f"started {engine.answer()}", number, len(methods))
            except BenchError as error:
                del engines[name]  # the others are compared without it
                print(f"FAILED {error}", flush=True)
        yield engines
    finally:
        for engine in engines.values():
            engine._pipe.close()


def _serve(pipe: Any, method: Method, spec: EngineSpec, options: dict[str, Any]) -> None:
    options = {**options, "worker_extension_cls": EXTENSION}
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
