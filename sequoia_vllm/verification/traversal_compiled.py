"""Traversal verification on CPUs, compiled: see ``traversal.cpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sequoia_vllm.cpp_library import load_library

_SOURCE = Path(__file__).with_name("traversal.cpp")
# Threads cost more than they save below this many probabilities.
_SERIAL_WORK = 1 << 20

Traverse = Callable[[ctypes.Structure], None]


class _Trees(ctypes.Structure):
    """The source's ``Trees``: same fields, same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "children", "tokens", "rows", "uniforms", "target", "draft", "accepted", "rest",
        )),
        *((name, ctypes.c_int64) for name in (
            "batch", "nodes", "branches", "vocabulary", "is_float64", "threads",
        )),
    )  # fmt: skip


@cache
def load_traversal() -> Traverse | None:
    """The compiled function; None where it cannot be compiled (logged once)."""
    library = load_library(
        _SOURCE, "Sequoia's traversal verification runs without its compiled code, more slowly"
    )
    if library is None:
        return None
    traverse = library.sequoia_traverse
    traverse.argtypes, traverse.restype = [ctypes.POINTER(_Trees)], None
    return lambda trees: traverse(ctypes.byref(trees))


def traverse_rows(
    traverse: Traverse,
    target: Tensor,
    draft: Tensor,
    rows: Tensor,
    tokens: Tensor,
    children: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """The end of each request's accepted path, with the decisions of `traverse_tree`.

    Args:
        traverse: From `load_traversal`.
        target, draft: P and Q of the nodes with children, float32 or float64 ``[R, V]``, on the
            CPU as all tensors.
        rows: int64 ``[B, N+1]``: where those of each node are; read for no other node.
        tokens: int64 ``[B, N+1]``; the root's is not read.
        children: int64 ``[B, N+1, b]``, as in `Topology`.
        uniforms: float64 ``[B, N+1]``, of `node_uniforms`.

    Returns:
        The accepted nodes, int64 ``[B]``, the root (0) where no other is; and what is left of
        P at those with children, but for a factor, ``[B, V]``; of others anything.
    """
    (batch, nodes, branches), vocabulary = children.shape, target.shape[1]
    accepted, rest = tokens.new_empty(batch), target.new_empty(batch, vocabulary)
    # The structure holds addresses: the tensors must live as long.
    given = [values.contiguous() for values in (children, tokens, rows, uniforms, target, draft)]
    parallel = batch > 1 and len(target) * vocabulary > _SERIAL_WORK
    traverse(
        _Trees(
            *(values.data_ptr() for values in (*given, accepted, rest)),
            batch, nodes, branches, vocabulary, target.dtype == torch.float64,
            torch.get_num_threads() if parallel else 1,
        )
    )  # fmt: skip
    return accepted, rest
