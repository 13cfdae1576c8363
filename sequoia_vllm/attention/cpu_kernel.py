"""The compiled CPU kernels for tree attention and commit: see ``tree_attention.cpp``.

Where there is no C++ compiler `load_kernels` gives None, and callers use torch
instead, which copies the context of every request for every layer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_cache import move_tokens
from sequoia_vllm.attention.tree_attention import within_window
from sequoia_vllm.cpp_library import load_library

_SOURCE = Path(__file__).with_name("tree_attention.cpp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LANES = 16  # of the source: head and block sizes must be multiples
# Threads cost more than they save below this much work (multiplications).
_SERIAL_WORK = 1 << 20
# A part of the context is worth a task of its own from this many blocks up.
_BLOCKS_PER_SPLIT = 4


class _TreeBatch(ctypes.Structure):
    """The source's ``TreeBatch``: same fields, same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "rows", "block_table", "context_lens", "num_nodes", "ancestors", "depths", "partials"
        )),
        *((name, ctypes.c_int64) for name in (
            "batch", "queries", "heads", "key_heads", "head_size", "block_size",
            "table_stride", "ancestors_stride", "splits", "threads", "dtype", "window",
        )),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float), ("one_tree", ctypes.c_bool),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """The facts about layers that the kernel needs; layers that agree share one object."""

    heads: int
    key_heads: int  # that query `heads` share
    head_size: int  # a multiple of 16
    block_size: int  # tokens per cache block; a multiple of 16
    scale: float  # softmax scale
    dtype: torch.dtype  # the type of query, output and cache
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    soft_cap: float = 0.0  # scores s become ``soft_cap * tanh(s / soft_cap)``; 0: they stay

    @cached_property
    def supported(self) -> bool:
        """Whether the kernel takes these sizes."""
        sizes = (self.head_size, self.block_size)
        return self.dtype in _DTYPES and all(size % _LANES == 0 for size in sizes)


class TreeAttentionBatch:
    """The trees of one forward pass, ready to be attended layer after layer.

    Args:
        rows: int64 ``[B, Q]``: row of each node in the flat tokens; -1: padding.
        block_table: int32 ``[B, blocks]``, or a view that is contiguous in its rows.
        context_lens: int64 ``[B]``: slots below are context; node j is in slot
            ``context_lens + j``.
        num_nodes: int64 ``[B]``: nodes whose keys and values are in the cache: of others nothing
            is read.
        ancestors: bool ``[Q, M]``: query q sees node j; or ``[B, Q, M]``, of each request.
        max_keys: Slots of the longest request.
    """

    def __init__(
        self,
        shape: AttentionShape,
        rows: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        num_nodes: Tensor,
        ancestors: Tensor,
        max_keys: int,
    ) -> None:
        batch, queries = rows.shape
        depths = context_lens.new_empty(0)
        if shape.window is not None:
            depths, ancestors = within_window(ancestors, shape.window)
        query_rows = queries * (shape.heads // shape.key_heads)
        units = batch * shape.key_heads
        seen = max_keys if shape.window is None else min(max_keys, shape.window + queries)
        work = 2 * units * query_rows * seen * shape.head_size
        threads = 1 if work < _SERIAL_WORK else torch.get_num_threads()
        # So many parts of each context that all threads have work.
        most = -(-seen // shape.block_size) // _BLOCKS_PER_SPLIT
        wanted = 1 if units >= 2 * threads else -(-2 * threads // units)
        splits = max(1, min(wanted, most))
        partials = torch.empty(units * splits * query_rows * (shape.head_size + 2))
        # The structure holds addresses: the tensors must live as long.
        self._tensors = (
            rows.contiguous(), block_table, context_lens.contiguous(), num_nodes.contiguous(),
            ancestors.contiguous(), depths, partials,
        )  # fmt: skip
        self._batch = ctypes.byref(_TreeBatch(
            *(tensor.data_ptr() for tensor in self._tensors),
            batch, queries, shape.heads, shape.key_heads, shape.head_size, shape.block_size,
            block_table.stride(0), ancestors.shape[-1], splits, threads,
            _DTYPES[shape.dtype], shape.window or 0, shape.scale * math.log2(math.e),
            shape.soft_cap * math.log2(math.e), ancestors.ndim == 2,
        ))  # fmt: skip

    def attend(
        self,
        kernels: Kernels,
        query: Tensor,
        kv_cache: Tensor,
        output: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Writes the attention of every node into its row of ``output``.

        Args:
            query, output: ``[tokens, heads * head_size]`` or ``[tokens, heads, head_size]``,
                contiguous within a token.
            kv_cache: One layer's cache, contiguous, in the layout of `cpu_cache`.
            sinks: float32 ``[heads]``, contiguous: see `tree_attention`.
        """
        kernels.attend(
            self._batch,
            query.data_ptr(), query.stride(0), output.data_ptr(), output.stride(0),
            kv_cache.data_ptr(), None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip


class CacheGroup:
    """Caches of layers that move their tokens together.

    Args:
        kv_caches: One per layer, all of one shape and dtype, in the layout of
            `cpu_cache`; or latents, ``[blocks, block_size, width]``.
    """

    def __init__(self, kv_caches: Sequence[Tensor]) -> None:
        # By address: layers may share one cache, whose tokens must move once.
        self.kv_caches = list({cache.data_ptr(): cache for cache in kv_caches}.values())
        first = self.kv_caches[0]
        assert all(cache.is_contiguous() for cache in self.kv_caches)
        assert all(cache.shape[1:] == first.shape[1:] for cache in self.kv_caches)
        self._addresses = (ctypes.c_void_p * len(self.kv_caches))(
            *(cache.data_ptr() for cache in self.kv_caches)
        )
        if first.ndim == 4:
            _, key_heads, block_size, twice_head_size = first.shape
            self._shape = first.element_size(), key_heads, twice_head_size // 2, block_size

    def move_tokens(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """`cpu_cache.move_tokens` in every layer, in place; slots are contiguous, too."""
        if self.kv_caches[0].ndim == 3:
            for latents in self.kv_caches:
                rows = latents.flatten(0, 1)
                rows[target_slots] = rows[source_slots]
        elif (kernels := load_kernels()) is None:
            for kv_cache in self.kv_caches:
                move_tokens(kv_cache, source_slots, target_slots)
        else:
            kernels.move_tokens(
                self._addresses, len(self.kv_caches), *self._shape,
                source_slots.data_ptr(), target_slots.data_ptr(), len(source_slots),
            )  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """The functions of ``tree_attention.cpp``."""

    attend: Callable[..., None]
    move_tokens: Callable[..., None]


@cache
def load_kernels() -> Kernels | None:
    """The kernels, compiled if need be; None where they cannot be (logged once)."""
    library = load_library(
        _SOURCE, "tree attention runs without its compiled kernel, slower at long contexts"
    )
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    attend, move = library.sequoia_tree_attention, library.sequoia_move_tokens
    attend.argtypes = [pointer, pointer, number, pointer, number, pointer, pointer]
    move.argtypes = [pointer, *[number] * 5, pointer, pointer, number]
    attend.restype = move.restype = None
    return Kernels(attend, move)
