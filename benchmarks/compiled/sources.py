"""Hashes of what kernels are compiled from, whatever the Triton: records are of that source."""

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import triton.language as tl

from benchmarks.compiled.variant import Variant
from benchmarks.compiled.variants import variants_by_kernel

_DIGITS = 16


def source_hashes() -> dict[str, str]:
    """Hashes by kernel's name, each of its code and of the launches of its variants.

    Comments, docstrings and the place of code do not count; functions that a kernel calls
    and constants that it names do, in whichever module they are.
    """
    return {name: source_hash(variants) for name, variants in variants_by_kernel().items()}


def source_hash(variants: Sequence[Variant]) -> str:
    """The hash of one kernel, from all its variants; see `source_hashes`."""
    code: dict[Callable[..., Any], list[str]] = {}
    _add_code(variants[0].kernel.fn, code)
    compiled = {
        "code": sorted(code.values()),
        "launches": {variant.name: variant.launch for variant in variants},
    }
    text = json.dumps(compiled, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _add_code(function: Callable[..., Any], code: dict[Callable[..., Any], list[str]]) -> None:
    """Adds a function's text with the constants that it names, and the functions it calls."""
    if function in code:
        return
    tree = ast.parse(inspect.getsource(function))
    code[function] = [ast.unparse(_without_docstring(tree))]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if hasattr(value, "fn"):  # of `triton.jit`
            _add_code(value.fn, code)
        elif isinstance(value, tl.constexpr):
            code[function].append(f"{name} = {value.value!r}")
        elif isinstance(value, list | tuple):  # names of arguments, for `triton.jit`
            code[function].append(f"{name} = {value!r}")
        elif not _is_of_triton(value):
            raise TypeError(
                f"a kernel names {function.__module__}.{name}, which is neither a function of"
                f" triton.jit nor a constant: {value!r}"
            )


def _is_of_triton(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return module.partition(".")[0] == "triton"


def _without_docstring(tree: ast.Module) -> ast.Module:
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return tree
