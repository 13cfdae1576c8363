"""Checks what interpreted Triton kernels do to memory: bounds, and programs that race.

Triton's interpreter reads and writes raw addresses of this process and runs the
programs of a launch in order, so a load past a block table returns whatever lies
there, and a kernel whose programs overwrite one another gives the right result. With
`memory_checks` (or `install`) each load and store must lie in the memory of the
argument that its pointer came from, programs run in a shuffled order, and bytes that
one program writes and another writes or reads are findings.

**Where a pointer came from** is kept in its upper 16 bits, which addresses do not use:
arithmetic carries them along, and they are taken off before memory is touched. So a
load past the end of one tensor is found even where another tensor begins. Integers
that a kernel turns into pointers (tables of addresses) stand for the whole storage of
the live tensor at that address.

Kernels of `own` modules (prefixes of module names) may touch exactly the elements of
the views they were given, and a finding raises. The others may touch the views' whole
storages, and findings are collected in `MemoryChecks.findings`.

To be installed in a process whose Triton interprets (``TRITON_INTERPRET=1``); Triton
3.9.0's interpreter is what is hooked.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.support.memory_launch import ADDRESS_BITS, Finding, MemoryCheckError, MemoryChecks

__all__ = [
    "Finding", "MemoryCheckError", "MemoryChecks", "install", "memory_checks", "uninstall",
    "wanted",
]  # fmt: skip

VARIABLE = "KERNEL_MEMORY_CHECKS"

_installed: "tuple[MemoryChecks, list[tuple[Any, str, Any]]] | None" = None


def install(checks: MemoryChecks | None = None) -> MemoryChecks:
    """Hooks the interpreter until `uninstall`."""
    global _installed
    if _installed is not None:
        raise RuntimeError("memory checks are installed already")
    checks = MemoryChecks() if checks is None else checks
    originals: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Callable[[Callable, MemoryChecks], Callable]) -> None:
        original = getattr(owner, name)
        originals.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(make(original, checks)))

    from triton.runtime import interpreter

    replace(interpreter, "_implicit_cvt", _tagging_arguments)
    replace(interpreter.GridExecutor, "__call__", _raising_plainly)
    replace(interpreter.GridExecutor, "_init_args_hst", _beginning)
    replace(interpreter.GridExecutor, "_restore_args_dev", _ending)
    builder = interpreter.InterpreterBuilder
    replace(builder, "set_grid_dim", _with_grid)
    replace(builder, "set_grid_idx", _with_program)
    replace(builder, "create_int_to_ptr", _tagging_numbers)
    replace(builder, "create_masked_load", _checked_load)
    replace(builder, "create_masked_store", _checked_store)
    for name in ("create_atomic_load", "create_atomic_store", "create_atomic_poll"):
        replace(builder, name, _atomic_access)
    replace(builder, "create_atomic_cas", _checked_exchange)
    replace(builder, "create_atomic_rmw", _checked_update)
    _installed = checks, originals
    return checks


def uninstall() -> None:
    """Leaves the interpreter as it was; nothing if it is not hooked."""
    global _installed
    if _installed is not None:
        for owner, name, original in reversed(_installed[1]):
            setattr(owner, name, original)
        _installed = None


@contextmanager
def memory_checks(checks: MemoryChecks | None = None) -> Iterator[MemoryChecks]:
    """The interpreter hooked for as long as the context lasts."""
    installed = install(checks)
    try:
        yield installed
    finally:
        uninstall()


def wanted() -> bool:
    """Whether the environment asks for the checks (``KERNEL_MEMORY_CHECKS``, on unless 0)."""
    return os.environ.get(VARIABLE, "1") != "0"


def _tagging_arguments(original: Callable, checks: MemoryChecks) -> Callable:
    def convert(argument: Any) -> Any:
        converted = original(argument)
        if not hasattr(argument, "data_ptr"):
            return converted
        tag = checks.launch.tags.get(id(getattr(argument, "base", argument)))
        if tag is not None:
            converted.handle.data = converted.handle.data | np.uint64(tag << ADDRESS_BITS)
        return converted

    return convert


def _raising_plainly(original: Callable, checks: MemoryChecks) -> Callable:
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        """Takes the finding out of the errors that each level of device functions adds."""
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            checks.abandon()
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, MemoryCheckError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None

    return call


def _beginning(original: Callable, checks: MemoryChecks) -> Callable:
    from triton.runtime import interpreter

    def init(self: Any, args: Any, kwargs: Any) -> Any:
        hosted, hosted_kwargs = original(self, args, kwargs)
        arguments = interpreter.inspect.getcallargs(self.fn, *hosted, **hosted_kwargs)
        pointers = {k: v for k, v in arguments.items() if k not in self.constexprs}
        checks.begin(self.fn, pointers)
        return hosted, hosted_kwargs

    return init


def _ending(original: Callable, checks: MemoryChecks) -> Callable:
    def restore(self: Any, *args: Any) -> None:
        original(self, *args)
        checks.end()

    return restore


def _with_grid(original: Callable, checks: MemoryChecks) -> Callable:
    def set_grid_dim(self: Any, *grid: int) -> None:
        checks.launch.set_grid(grid)  # type: ignore[arg-type]
        original(self, *grid)

    return set_grid_dim


def _with_program(original: Callable, checks: MemoryChecks) -> Callable:
    return lambda self, *place: original(self, *checks.launch.start_program(*place))


def _tagging_numbers(original: Callable, checks: MemoryChecks) -> Callable:
    def create(self: Any, source: Any, destination: Any) -> Any:
        pointer = original(self, source, destination)
        pointer.data = checks.launch.tag_numbers(pointer.data)
        return pointer

    return create


def _untagged(handle: Any, addresses: np.ndarray) -> Any:
    return type(handle)(addresses, handle.dtype)


def _width(handle: Any) -> int:
    """Bytes of what a pointer points to; conditions take one."""
    return max(1, handle.get_element_ty().primitive_bitwidth // 8)


def _checked_load(original: Callable, checks: MemoryChecks) -> Callable:
    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        addresses, inside = checks.launch.access("read", pointers.data, mask.data, _width(pointers))
        return original(
            self, _untagged(pointers, addresses), _untagged(mask, inside), *rest, **named
        )

    return load


def _checked_store(original: Callable, checks: MemoryChecks) -> Callable:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses, inside = checks.launch.access(
            "write", pointers.data, mask.data, _width(pointers)
        )
        return original(self, _untagged(pointers, addresses), value, _untagged(mask, inside), *rest)

    return store


def _atomic_access(original: Callable, checks: MemoryChecks) -> Callable:
    def access(self: Any, *args: Any) -> Any:
        checks.launch.in_atomic = True
        try:
            return original(self, *args)
        finally:
            checks.launch.in_atomic = False

    return access


def _checked_exchange(original: Callable, checks: MemoryChecks) -> Callable:
    def exchange(self: Any, pointers: Any, *rest: Any) -> Any:
        launch = checks.launch
        launch.in_atomic = True
        everywhere = np.ones(pointers.data.shape, dtype=bool)
        addresses, inside = launch.access("write", pointers.data, everywhere, _width(pointers))
        launch.in_atomic = False
        if not inside.all():
            raise MemoryCheckError(f"{launch.kernel}: atomic exchange outside of its argument")
        return original(self, _untagged(pointers, addresses), *rest)

    return exchange


def _checked_update(original: Callable, checks: MemoryChecks) -> Callable:
    def update(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch = checks.launch
        launch.in_atomic = True
        addresses, inside = launch.access("write", pointers.data, mask.data, _width(pointers))
        launch.in_atomic = False
        return original(
            self, operation, _untagged(pointers, addresses), value, _untagged(mask, inside), *rest
        )

    return update
