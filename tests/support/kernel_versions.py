"""Which versions of our kernels a GPU would compile, seen where they are interpreted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Version = tuple[str, str]
"""Name of a kernel, and what Triton compiles it by: constants, types, alignment, options."""


@contextmanager
def recording_versions() -> Iterator[set[Version]]:
    """Versions of our kernels that are launched or captured within the block, on an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from sequoia_vllm.engine.common.patched import patched

    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders: dict[Callable, tuple[list[str], Callable]] = {}
    found: set[Version] = set()
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
