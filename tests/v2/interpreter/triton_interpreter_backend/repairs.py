"""What Triton 3.9.0's interpreter lacks and vLLM 0.32's V2 needs; vLLM runs it in every process."""

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.quicker import interpret_quickly, look_past_what_is_imported


def register() -> None:
    """Applies the repairs; may run more than once, as vLLM's plugins do.

    Raises RuntimeError where kernels are not interpreted: without a compiler
    behind the backend they could not run, and V1 would not be V1 as installed.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton_interpreter_backend is on the path without TRITON_INTERPRET=1")
    _keep_scalar_booleans()
    _give_libdevice_bodies()
    _find_a_largest_among_nan()
    _filter_top_k_top_p_in_torch()
    _allow_async_scheduling()
    interpret_quickly()
    _take_larger_blocks()
    look_past_what_is_imported()


def _take_larger_blocks() -> None:
    """Fewer programs and passes; `tests/kernels` takes the blocks that GPUs do.

    Children are drawn from 2,048 tokens at once: the embedded pair still has two such blocks.
    Attention in float32 takes 64 rows and keys at once, as in half precision, not 16.
    """
    from sequoia_vllm.drafting import drafted_trees
    from sequoia_vllm.kernels import tree_attention

    drafted_trees._MIN_BLOCK = 2048
    choose = tree_attention.choose_tile
    if getattr(choose, "is_larger", False):
        return

    def choose_tile(rows: int, head_size: int, element_size: int, *rest: Any, **named: Any) -> Any:
        tile = choose(rows, head_size, element_size, *rest, **named)
        return replace(tile, rows=64, keys=64) if element_size == 4 else tile

    choose_tile.is_larger = True  # type: ignore[attr-defined]
    tree_attention.choose_tile = choose_tile


def _keep_scalar_booleans() -> None:
    """`create_splat` widens a scalar condition to int64, which masks then refuse."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_splat
    if getattr(original, "keeps_booleans", False):
        return

    def create_splat(self: Any, block_type: Any, scalar: TensorHandle) -> TensorHandle:
        if scalar.data.dtype == np.bool_:
            value = scalar.data.reshape(-1)[0]
            return TensorHandle(np.full(block_type.shape, value), scalar.dtype.scalar)
        return original(self, block_type, scalar)

    create_splat.keeps_booleans = True  # type: ignore[attr-defined]
    InterpreterBuilder.create_splat = create_splat


def _give_libdevice_bodies() -> None:
    """libdevice's functions are declarations that return None when interpreted."""
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def elementwise(function: Callable, result_type: Any = None) -> Callable:
        def apply(value: Any) -> Any:
            scalar = result_type or value.type.scalar
            block = value.type.with_element_ty(scalar) if value.type.is_block() else scalar
            return tl.tensor(TensorHandle(function(value.handle.data), scalar), block)

        return apply

    libdevice.log1p = elementwise(np.log1p)
    libdevice.isnan = elementwise(np.isnan, tl.int1)


def _find_a_largest_among_nan() -> None:
    """`argmax` of NaN alone is some place on GPUs; NumPy raises an error."""
    from triton.runtime.interpreter import ReduceOps

    original = ReduceOps.min_max
    if getattr(original, "finds_one", False):
        return

    def largest(numbers: Any, **how: Any) -> Any:
        return np.argmax(np.where(np.isnan(numbers), -np.inf, numbers), **how)

    def min_max(self: Any, given: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        is_argmax = idx_reduce_op is np.nanargmax
        return original(self, given, val_reduce_op, largest if is_argmax else idx_reduce_op)

    min_max.finds_one = True  # type: ignore[attr-defined]
    ReduceOps.min_max = min_max


def _filter_top_k_top_p_in_torch() -> None:
    """The Triton kernel calls tensor methods on what the interpreter hands it as plain ints."""
    module = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    module.HAS_TRITON = False


def _allow_async_scheduling() -> None:
    """The CPU platform switches asynchronous scheduling off, GPU engines have it on by default.

    Kept as the engine's arguments say (`async_scheduling=False` switches it
    off), because the scheduler then hands the runner other things: draft
    tokens stay with the runner and the scheduler sees placeholders.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config
    if getattr(original, "keeps_async_scheduling", False):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    check_and_update_config.keeps_async_scheduling = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
