"""What vLLM does while it is imported, starts and waits, in less time; nothing is tested by it."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def lazily(loader: Loader, functions: tuple[str, ...] = ()) -> Loader:
    """Runs a module's code when the module is first asked for what only its code defines.

    `importlib.util.LazyLoader` runs it for any attribute, also for the file and name that
    `inspect` asks all modules for. `functions`: names that others import and do not call
    yet; they get functions that run the module's code and then call its own.
    """
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        content = vars(module)

        def run() -> None:
            del content["__getattr__"]
            execute(module)

        def get(name: str) -> Any:
            if name[:2] == "__" and name != "__all__":
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            run()
            return getattr(module, name)

        def calling(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if content[name] is call:
                    run()
                return content[name](*arguments, **options)

            return call

        content["__getattr__"] = get
        content.update({name: calling(name) for name in functions})

    loader.exec_module = exec_module  # type: ignore[method-assign]
    return loader


def changing(loader: Loader, change: Callable[[ModuleType], None]) -> Loader:
    """Changes a module as soon as its code has run."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
    return loader


def wait_asleep(shm_broadcast: ModuleType) -> None:
    """Ranks and their engine look for each other's messages a thousand times a second.

    vLLM looks all the time until there has been none for a second, which takes a core from
    whoever is at work.
    """
    shm_broadcast.sched_yield = lambda: time.sleep(1e-3)  # type: ignore[attr-defined]


FORK_ENGINES = "TESTS_FORK_ENGINES"


def fork_engines(system_utils: ModuleType) -> None:
    """Engines and ranks are forked, where the environment has `FORK_ENGINES`: they import nothing.

    As vLLM does on GPUs. On CPUs it spawns them. They let go of their server's port: a server that
    ends asks who else holds it, and fails if that process ends just then.
    """
    choose = system_utils.get_mp_context
    psutil = system_utils.psutil

    def leave_ports() -> None:
        if os.environ.get(FORK_ENGINES):
            nothing = os.open(os.devnull, os.O_RDONLY)
            for connection in psutil.Process().net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    os.dup2(nothing, connection.fd)

    os.register_at_fork(after_in_child=leave_ports)

    def get_mp_context() -> multiprocessing.context.BaseContext:
        return multiprocessing.get_context("fork") if os.environ.get(FORK_ENGINES) else choose()

    system_utils.get_mp_context = get_mp_context  # type: ignore[attr-defined]


def inspect_models_here(registry: ModuleType) -> None:
    """vLLM looks at each kind of model in a process of its own, which imports vLLM for it.

    It spares its own process a CUDA context; there is none here.
    """
    registry._run_in_subprocess = lambda inspect: inspect()  # type: ignore[attr-defined]


_defined: list[Any] = []  # kept: operators go with the library that has them


def define_operators(loader: Loader) -> Loader:
    """Two operators that torchvision's CUDA build needs while it is imported beside a CPU's torch.

    PyPI has no other build, and vLLM's multimodal models import it for their image processors,
    which call neither. It lies in a folder of its own.
    """
    if not _defined and "torchvision-for-tests" in str(getattr(loader, "path", "")):
        import torch

        _defined.append(library := torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    return loader


LOADERS: dict[str, Callable[[Loader], Loader]] = {
    "torchvision": define_operators,
    # vLLM resamples audio with it: half a thousand modules.
    "scipy.signal": lazily,
    # The losses of transformers' detectors import this one.
    "scipy.optimize": partial(lazily, functions=("linear_sum_assignment",)),
    "vllm.model_executor.models.registry": partial(changing, change=inspect_models_here),
    "vllm.utils.system_utils": partial(changing, change=fork_engines),
    "vllm.distributed.device_communicators.shm_broadcast": partial(changing, change=wait_asleep),
}


class QuickFinder(MetaPathFinder):
    """Finds the modules of `LOADERS` where Python does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in LOADERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LOADERS[name](spec.loader)
        return spec


def install() -> None:
    sys.meta_path.insert(0, QuickFinder())
