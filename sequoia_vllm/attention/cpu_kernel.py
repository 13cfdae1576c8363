"""vLLM's CPU KV cache, and the compiled kernels for tree attention and commit in it.

Where there is no C++ compiler for ``tree_attention.cpp`` `load_kernels` gives None. Callers then
use torch, which copies the context of every request for every layer.

One layer's cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``. Within a block and
head the first half of the memory holds the keys *transposed*, ``[head_size, block_size]``, the
second half the values, ``[block_size, head_size]``. So it is for the instruction sets "vec" and
"vec16". For `PACKED_ISA` each of these two matrices is in panels of 16 columns, and two rows of a
panel lie side by side, column by column. A test checks this against vLLM's own cache-update op for
every dtype and head size.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from sequoia_vllm.attention.tree_attention import tree_attention_mask, within_window
from sequoia_vllm.cpp_library import load_library

SUPPORTED_ISA = ("vec", "vec16")
PACKED_ISA = "amx"
"""vLLM takes it for bfloat16 where a CPU has AMX. The compiled kernels read its layout, torch does
not."""

_SOURCE = Path(__file__).with_name("tree_attention.cpp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PACKED, _PANEL = 3, 16  # the kernel's number for packed bfloat16; columns of a panel
_LANES = 16  # of the source: head and block sizes must be multiples
# Threads cost more than they save below this much work (multiplications).
_SERIAL_WORK = 1 << 20
# A part of the context is worth a task of its own from this many blocks up.
_BLOCKS_PER_SPLIT = 4


def keys_and_values(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of one layer's cache by token: both ``[num_blocks, heads, block_size, head_size]``."""
    num_blocks, num_heads, block_size, twice_head_size = kv_cache.shape
    head_size = twice_head_size // 2
    halves = kv_cache.view(num_blocks, num_heads, 2, block_size * head_size)
    keys = halves[:, :, 0].unflatten(-1, (head_size, block_size)).transpose(-1, -2)
    values = halves[:, :, 1].unflatten(-1, (block_size, head_size))
    return keys, values


def packed_keys_and_values(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a layer's cache in the layout of `PACKED_ISA`, by token.

    Returns:
        Keys ``[num_blocks, heads, block_size / 16, 16, head_size / 2, 2]``, and values
        ``[num_blocks, heads, block_size / 2, 2, head_size / 16, 16]``.
    """
    num_blocks, num_heads, block_size, twice_head_size = kv_cache.shape
    head_size = twice_head_size // 2
    halves = kv_cache.view(num_blocks, num_heads, 2, block_size * head_size)
    keys = halves[:, :, 0].unflatten(-1, (block_size // _PANEL, head_size // 2, _PANEL, 2))
    values = halves[:, :, 1].unflatten(-1, (head_size // _PANEL, block_size // 2, _PANEL, 2))
    return keys.transpose(3, 4), values.permute(0, 1, 3, 5, 2, 4)


def gather_context(kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of whole requests, in slot order.

    Args:
        block_table: int ``[B, blocks]``: the blocks to read, per request.

    Returns:
        Two copies, ``[B, heads, blocks * block_size, head_size]``.
    """
    batch, num_blocks = block_table.shape
    blocks = block_table.reshape(-1).long()

    def gather(tokens: Tensor) -> Tensor:
        gathered = tokens.index_select(0, blocks).unflatten(0, (batch, num_blocks))
        return gathered.transpose(1, 2).flatten(2, 3)

    keys, values = keys_and_values(kv_cache)
    return gather(keys), gather(values)


def move_tokens(kv_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copies tokens' keys and values between slots of one layer's cache, in place.

    Args:
        source_slots, target_slots: int64 ``[M]``; target slots are distinct. A slot may be both
            source and target: all reads come first.
    """
    block_size = kv_cache.shape[2]
    source_block, source_offset = source_slots // block_size, source_slots % block_size
    target_block, target_offset = target_slots // block_size, target_slots % block_size
    for tokens in keys_and_values(kv_cache):
        tokens[target_block, :, target_offset] = tokens[source_block, :, source_offset]


def clear_tokens(kv_cache: Tensor, slots: Tensor, packed: bool = False) -> None:
    """Writes zeros to slots, int64 ``[M]``, of one layer's cache or latents.

    vLLM's kernel multiplies values that it masks by 0, which leaves NaN what it is.
    """
    if kv_cache.ndim == 3:
        kv_cache.flatten(0, 1)[slots] = 0
        return
    if packed:
        block, place = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        for tokens, size in zip(packed_keys_and_values(kv_cache), (_PANEL, 2), strict=True):
            tokens[block, :, place // size, place % size] = 0
        return
    for tokens in keys_and_values(kv_cache):
        tokens[slots // kv_cache.shape[2], :, slots % kv_cache.shape[2]] = 0


class _TreeBatch(ctypes.Structure):
    """The source's ``TreeBatch``: same fields, same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "rows", "block_table", "context_lens", "num_nodes", "ancestors", "depths", "partials",
            "spoilt",
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
    packed: bool = False  # whether the cache has the layout of `PACKED_ISA`

    @cached_property
    def supported(self) -> bool:
        """Whether the kernel takes these sizes."""
        sizes = (self.head_size, self.block_size)
        return self.dtype in _DTYPES and all(size % _LANES == 0 for size in sizes)


@dataclass(frozen=True)
class TreeQueries:
    """The rows of a batch that are tree nodes, and what they attend to."""

    rows: Tensor
    """int64 ``[B, Q]``: row of each node in the batch's flat tokens; -1: padding, left alone."""
    block_table: Tensor  # int32 ``[B, max_blocks]``: each request's cache blocks
    context_lens: Tensor  # int64 ``[B]``: committed tokens; node j is in slot ``context_lens + j``
    num_nodes: Tensor  # int64 ``[B]``: nodes of each request whose keys and values are in the cache
    ancestors: Tensor  # bool ``[Q, M]``, or ``[B, Q, M]`` by request: query q sees node j
    max_keys: int  # slots of the longest request
    only_trees: bool  # no row of the batch is anything but a tree node
    spoilt: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.uint8))
    """Set to 1 once a layer has met NaN or infinity among the nodes' values."""
    _batches: dict[AttentionShape, "TreeAttentionBatch"] = field(default_factory=dict)
    _masks: dict[tuple[int, torch.dtype, int | None], Tensor] = field(default_factory=dict)

    def for_kernel(self, shape: AttentionShape) -> "TreeAttentionBatch":
        """These queries for the compiled kernel; made once for all layers of a shape."""
        batch = self._batches.get(shape)
        if batch is None:
            batch = self._batches[shape] = TreeAttentionBatch(shape, self)
        return batch

    def is_packed(self, kv_cache: Tensor) -> bool:
        """Whether a cache of such layers, which these rows attended to, is packed."""
        return any(
            shape.packed
            and (shape.key_heads, shape.block_size, 2 * shape.head_size) == kv_cache.shape[1:]
            for shape in self._batches
        )

    def blocks_in_use(self, block_size: int) -> Tensor:
        """The block table, cut to the longest request."""
        return self.block_table[:, : -(-self.max_keys // block_size)]

    def mask(self, num_keys: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """Additive mask ``[B, 1, Q, num_keys]``; made once for all layers of a window."""
        key = num_keys, dtype, window
        if key not in self._masks:
            self._masks[key] = tree_attention_mask(
                self.context_lens, self.ancestors, num_keys, dtype, window
            )
        return self._masks[key]

    def unseen(self, num_keys: int, mask: Tensor) -> Tensor:
        """bool ``[B, num_keys]``: positions that hold anything, even NaN, by such a `mask`.

        A mask's 0 times NaN is NaN, and minus infinity plus NaN, too.
        """
        ends = (self.context_lens + self.num_nodes)[:, None]
        return (torch.arange(num_keys) >= ends) | (mask == -torch.inf).all(dim=2)[:, 0]

    def note(self, values: Tensor) -> None:
        """Sets `spoilt` for values that torch attends to."""
        if not values.isfinite().all():
            self.spoilt.fill_(1)


class TreeAttentionBatch:
    """The trees of one forward pass, ready to be attended layer after layer.

    Their block table must be contiguous in its rows.
    """

    def __init__(self, shape: AttentionShape, trees: TreeQueries) -> None:
        batch, queries = trees.rows.shape
        ancestors, max_keys = trees.ancestors, trees.max_keys
        depths = trees.context_lens.new_empty(0)
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
            trees.rows.contiguous(), trees.block_table, trees.context_lens.contiguous(),
            trees.num_nodes.contiguous(), ancestors.contiguous(), depths, partials, trees.spoilt,
        )  # fmt: skip
        self._batch = ctypes.byref(_TreeBatch(
            *[tensor.data_ptr() for tensor in self._tensors],
            batch, queries, shape.heads, shape.key_heads, shape.head_size, shape.block_size,
            trees.block_table.stride(0), ancestors.shape[-1], splits, threads,
            _PACKED if shape.packed else _DTYPES[shape.dtype], shape.window or 0,
            shape.scale * math.log2(math.e), shape.soft_cap * math.log2(math.e),
            ancestors.ndim == 2,
        ))  # fmt: skip

    def attend(
        self,
        kernels: ctypes.CDLL,
        query: Tensor,
        kv_cache: Tensor,
        output: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Writes the attention of every node into its row of ``output``.

        Args:
            query, output: ``[tokens, heads * head_size]`` or ``[tokens, heads, head_size]``,
                contiguous within a token.
            kv_cache: One layer's cache, contiguous, in the layout above.
            sinks: float32 ``[heads]``, contiguous: see `tree_attention`.
        """
        kernels.sequoia_tree_attention(
            self._batch,
            query.data_ptr(), query.stride(0), output.data_ptr(), output.stride(0),
            kv_cache.data_ptr(), None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip


class CacheGroup:
    """Caches of layers that move their tokens together.

    Args:
        kv_caches: One per layer, contiguous, all of one shape and dtype, in the layout above; or
            latents, ``[blocks, block_size, width]``.
        packed: Whether they have the layout of `PACKED_ISA`.
    """

    def __init__(self, kv_caches: Sequence[Tensor], packed: bool = False) -> None:
        self.packed = packed
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
            head_size = twice_head_size // 2
            self._shape = first.element_size(), int(packed), key_heads, head_size, block_size

    def move_tokens(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """`move_tokens` in every layer, in place; slots are contiguous, too."""
        if self.kv_caches[0].ndim == 3:
            for latents in self.kv_caches:
                rows = latents.flatten(0, 1)
                rows[target_slots] = rows[source_slots]
        elif (kernels := load_kernels()) is None:
            for kv_cache in self.kv_caches:
                move_tokens(kv_cache, source_slots, target_slots)
        else:
            kernels.sequoia_move_tokens(
                self._addresses, len(self.kv_caches), *self._shape,
                source_slots.data_ptr(), target_slots.data_ptr(), len(source_slots),
            )  # fmt: skip


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The library of ``tree_attention.cpp``; None where it cannot be compiled (logged once)."""
    library = load_library(
        _SOURCE, "tree attention runs without its compiled kernel, slower at long contexts"
    )
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    attend, move = library.sequoia_tree_attention, library.sequoia_move_tokens
    attend.argtypes = [pointer, pointer, number, pointer, number, pointer, pointer]
    move.argtypes = [pointer, *[number] * 6, pointer, pointer, number]
    attend.restype = move.restype = None
    return library
