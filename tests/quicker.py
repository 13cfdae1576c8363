"""What takes time in the processes of tests, and nothing is tested by it."""

import atexit
import functools
import gc
from collections.abc import Callable


def collect_new_garbage_only() -> None:
    """What a full collection has left is not looked at by the next one, until `gc.unfreeze`.

    vLLM collects some twenty times while an engine starts, each time for half a
    second, as imports have made a million objects. May run more than once.
    """
    original = gc.collect
    if getattr(original, "freezes", False):
        return

    @functools.wraps(original)
    def collect(generation: int = 2) -> int:
        found = original(generation)
        if generation == 2:
            gc.freeze()
        return found

    atexit.register(gc.unfreeze)  # for libraries that look for leaks at the end
    collect.freezes = True  # type: ignore[attr-defined]
    gc.collect = collect  # type: ignore[assignment]


def keep_the_language_patched() -> None:
    """The functions of `triton.language` are replaced once, not in every call of a device function.

    Triton 3.9.0 looks through all of its language before each launch and before each
    call of a function within a kernel, even of `tl.sum`, and puts things back after a
    launch only: a third of the time of our kernels. May run more than once.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    if getattr(original, "is_once", False):
        return
    patched: set[int] = set()

    def patch_lang(function: Callable) -> interpreter._LangPatchScope:
        module = function.__globals__
        if id(module) not in patched:
            original(function)
            patched.add(id(module))
        return interpreter._LangPatchScope()  # of which nothing is to be put back

    patch_lang.is_once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang
