"""What takes time in the processes of tests, and nothing is tested by it."""

import atexit
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

_freeze, unfreeze = gc.freeze, gc.unfreeze


def look_past_what_is_imported() -> None:
    """No collection of garbage looks at objects that are there now. May run more than once.

    To be called where no engine runs. vLLM collects some ten times while an engine
    starts and ends, each time for half a second, as imports have made a million
    objects. It freezes the engine's own, too, and in the end lets all be looked at
    again: neither does anything from now on, but for `unfreeze`.
    """
    if gc.freeze is _do_nothing:
        gc.collect()  # an engine that has ended, of 150 MB: what is frozen stays forever
    _freeze()
    gc.freeze = gc.unfreeze = _do_nothing
    atexit.unregister(unfreeze)
    atexit.register(unfreeze)  # for libraries that look for leaks at the end


def _do_nothing() -> None:
    pass


def interpret_quickly() -> None:
    """Triton 3.9.0's interpreter without what it does again and again. May run more than once.

    - The functions of `triton.language` are replaced once: it looks through all of its
      language before each launch and before each call of a function within a kernel,
      even of `tl.sum`, and puts things back after a launch only.
    - NumPy's dtypes of Triton's are remembered: it makes a table of all for each operation.
    - So are shapes, and builtins are called without their wrapper.
    - Integers are computed once: it does so twice, and looks at one result only.

    And torch converts fp8: the interpreter forgets to carry, and takes NaN for 480.
    """
    from triton.runtime import interpreter

    if getattr(interpreter._patch_lang, "is_once", False):
        return
    _remember_blocks()
    _call_directly()
    _leave_integers_unchecked()
    interpreter._patch_lang = _once_per_module(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    interpreter._convert_float = _converted_by_torch(interpreter._convert_float)


def _converted_by_torch(convert: Callable[..., Any]) -> Callable[..., Any]:
    import triton.language as tl

    fp8 = tl.float8e4nv
    known = {
        fp8: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16,
        tl.float32: torch.float32,
    }  # fmt: skip
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

    def converted(numbers: Any, source: Any, target: Any, *how: Any) -> Any:
        if fp8 not in (source, target) or not {source, target} <= known.keys():
            return convert(numbers, source, target, *how)
        given = torch.from_numpy(np.ascontiguousarray(numbers)).view(known[source])
        if target == fp8:  # as GPUs, which saturate
            largest = torch.finfo(known[fp8]).max
            given = given.float().clamp(-largest, largest)
        found = given.to(known[target])
        return found.view(bits[found.itemsize]).numpy().reshape(numbers.shape)

    return converted


def _remember_blocks() -> None:
    """Shapes, which nobody changes, of block types and of tensors, whose are of `constexpr`.

    Triton makes a type and a shape in two forms for each operation, which takes longer than NumPy's
    own operation.
    """
    from triton.language import core

    make_block_type, constexpr = core.block_type.__init__, core.constexpr
    of_blocks: dict[tuple, tuple] = {}
    of_scalars = core.tuple([]), constexpr(1)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if size.__class__ is constexpr else size for size in shape]
        key = (shape.__class__, *sizes)
        known = of_blocks.get(key)
        if known is None or set(map(type, sizes)) != {int}:
            make_block_type(self, element_ty, shape)
            of_tensors = core.tuple([constexpr(size) for size in self.shape]), constexpr(self.numel)
            of_blocks[key] = known = self.shape, self.numel, of_tensors
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensors = known

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalars

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(core.block_type, "name")
    core.block_type.name = name


def _call_directly() -> None:
    """Builtins are called without the wrapper that looks for the argument given here."""
    from triton.language import core
    from triton.runtime import interpreter

    wrapper = core.builtin(_call_directly).__code__

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        is_wrapped = getattr(member, "__code__", None) is wrapper
        function = member.__wrapped__ if is_wrapped else member

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr


def _leave_integers_unchecked() -> None:
    """Sums and products of integers are not computed a second time, in 64 bits.

    Triton compares the two only where kernels are debugged, which nothing here does.
    """
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def _once_per_module(patch: Callable) -> Callable:
    from triton.runtime.interpreter import _LangPatchScope

    patched: set[int] = set()

    def patch_lang(function: Callable) -> _LangPatchScope:
        module = function.__globals__
        if id(module) not in patched:
            patch(function)
            patched.add(id(module))
        return _LangPatchScope()  # of which nothing is to be put back

    patch_lang.is_once = True  # type: ignore[attr-defined]
    return patch_lang


def _remembered(find: Callable) -> Callable:
    """By a type's element, whose name says all of it: blocks differ in their shapes only."""
    known: dict[str, object] = {}

    def get_np_dtype(dtype: object) -> object:
        name = dtype.scalar.name  # type: ignore[attr-defined]
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return get_np_dtype
