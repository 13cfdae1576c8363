"""Tree attention over a paged KV cache, in Triton.

Every node sees the whole committed context and, of the tree, itself and its ancestors. Node j of
a request with c committed tokens keeps its key and value in cache position c + j. So one pass
over positions serves both, and a cache in fp8 gives the tree exactly what plain decoding would
read from it.

The nodes of a request and the query heads that share a key head are the rows of one matrix
product. So keys are read once for up to `MAX_ROWS` rows. Where that leaves processors idle the
positions are divided into splits, and a second launch merges their results. Launch shapes depend
on nothing that only the device knows: a CUDA graph may hold the launches.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from sequoia_vllm.kernels.node_masks import NodeMask
from sequoia_vllm.kernels.split_plan import SplitPlan
from sequoia_vllm.kernels.tree_attention_kernels import (
    PLAN_COLUMNS,
    merge_splits_kernel,
    tree_attention_kernel,
)
from sequoia_vllm.kernels.tree_shapes import rows_per_slot

MAX_ROWS = 128
# Rows of one matrix product must be at least as many as the tensor cores take.
_MIN_ROWS = 16
# A split costs a merge, so it gets at least this many positions to be worth it.
MIN_POSITIONS_PER_SPLIT = 256
# Hopper, and Blackwell for data centres: their tensor cores read operands from shared memory. All
# others take them from registers, consumer Blackwell (12.x) too. Among those, 8.6, 8.9 and 12.x
# have 99 KB of shared memory at most.
_READ_SHARED_MEMORY = range(90, 120)
HOPPER = 90
# Registers of a thread. The compiler is told so where it would spill a few to fit one more
# program on a processor than `choose_splits` plans for.
_ALL_REGISTERS = 255
_SPLITS_AT_ONCE = 16
_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP8_CAPABILITY = 89
EXTRA_SIZES = (16, 32, 64, 128)
"""Channels that keys may have more than values: latents' have those with positions more."""
# For a program that reads no context: it is short, and larger ones would spill registers.
_ROWS_OF_NODES = 16


@dataclass(frozen=True)
class Tile:
    """The tile of one program, and how the program is compiled."""

    rows: int  # pairs of node and query head
    keys: int  # positions taken at once
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; None leaves it to the compiler


@cache  # steps that also read a prompt ask in every layer, while the device waits
def choose_tile(
    rows: int,
    head_size: int,
    element_size: int,
    capability: int,
    quantized: bool = False,
    windowed: bool = False,
    latent: bool = False,
    larger_keys: bool = False,
) -> Tile:
    """The tile for requests of up to ``rows`` rows.

    Args:
        rows: Nodes times query heads per key head.
        head_size: D.
        element_size: Bytes of a query element.
        capability: Compute capability of the device, times ten.
        latent: Whether values are their keys' first channels.
        larger_keys: Whether keys have more channels than values of their own.
    """
    rows = min(MAX_ROWS, max(_MIN_ROWS, triton.next_power_of_2(rows)))
    padded_head_size = triton.next_power_of_2(head_size)
    if element_size == 4:
        # No tensor cores in full precision: products run in registers, which
        # larger tiles would exhaust.
        registers = _ALL_REGISTERS if padded_head_size == 128 else None
        warps = 8 if padded_head_size > 256 else 4
        return Tile(16, 16, num_warps=warps, num_stages=2, max_registers=registers)
    if padded_head_size > 256:  # Gemma 4's layers without a window, and MLA
        registers = _ALL_REGISTERS if latent else None
        return Tile(min(rows, 32), 32, num_warps=8, num_stages=2, max_registers=registers)
    # The output stays in registers, and so do queries that are not read elsewhere and
    # keys in fp8, which are converted there.
    in_registers = quantized or capability not in _READ_SHARED_MEMORY
    if in_registers and padded_head_size > 128:
        rows = min(rows, 32)
    elif (windowed or larger_keys) and padded_head_size > (64 if in_registers else 128):
        rows = min(rows, 64)  # the beginnings of rows' windows, or more channels, take registers
    output_size = rows * padded_head_size
    wide = rows > 64 or output_size > 64 * 128
    wide |= windowed and (rows, padded_head_size) == (64, 128)
    # 64 positions fill the tensor cores; fewer where registers or shared memory end,
    # more where a block has few bytes.
    full = in_registers and output_size >= 64 * 128
    keys = 32 if full or padded_head_size > 128 else 64 if output_size > 16 * 64 else 128
    blackwell = not in_registers and capability > HOPPER
    spills = (blackwell and padded_head_size <= 64 <= rows) or (windowed and keys == 128) or latent
    spills |= quantized and larger_keys
    registers = _ALL_REGISTERS if spills else None
    # Three stages. While one block is computed, the next one's keys and values are on their way,
    # and the block table's entries for the one after.
    return Tile(rows, keys, 8 if wide else 4, num_stages=3, max_registers=registers)


def choose_splits(units: int, tile: Tile, processors: int, max_positions: int) -> int:
    """Splits of each context, as many as the processors can run at once.

    Args:
        units: Programs that there are without splits.
        max_positions: Bound on the positions of a request.
    """
    programs = _programs_at_once(tile, processors)
    return max(1, min(programs // units, -(-max_positions // MIN_POSITIONS_PER_SPLIT)))


def _programs_at_once(tile: Tile, processors: int) -> int:
    """Eight warps take a processor's registers; of four, two programs are there at a time. Either
    way a processor has at most `MAX_ROWS` rows."""
    return processors * (1 if tile.num_warps == 8 else 2)


class TreeAttentionWorkspace:
    """Memory for the results of splits; one for all layers and trees of a stream.

    It serves any batch and tree: contexts are only split where there are few programs.

    Args:
        head_size: Largest of the layers that use it.
        processors: Multiprocessors to occupy; the device's own if not given.
    """

    def __init__(
        self, head_size: int, device: torch.device | str, processors: int | None = None
    ) -> None:
        device = torch.device(device)
        own, self.capability = 1, HOPPER  # in Triton's interpreter
        if device.type == "cuda":
            own = torch.cuda.get_device_properties(device).multi_processor_count
            major, minor = torch.cuda.get_device_capability(device)
            self.capability = 10 * major + minor
        self.processors = own if processors is None else processors
        size = self.size_in_bytes(head_size, self.processors)
        self._memory = torch.empty(size // 4, dtype=torch.float32, device=device)

    @staticmethod
    def size_in_bytes(head_size: int, processors: int) -> int:
        """Bytes of a workspace: a float32 output and log-sum-exp for each row of each split."""
        return processors * MAX_ROWS * (head_size + 1) * 4

    def rows(self, head_size: int) -> int:
        """Rows of this head size that it has room for."""
        return len(self._memory) // (head_size + 1)

    def partials(self, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
        """Outputs ``[rows, head_size]`` and log-sum-exps ``[rows]``, flat; at most `rows`."""
        outputs = rows * head_size
        return self._memory[:outputs], self._memory[outputs : outputs + rows]


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tree: Any,
    mask: NodeMask,
    *,
    scale: float,
    key_scale: float | Tensor,
    value_scale: float | Tensor,
    output: Tensor,
    context_lse: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Writes the attention of every tree node into its row of ``output``.

    Rows ``query_start_loc[r]`` to ``query_start_loc[r + 1]`` are request r's nodes ``first``,
    ``first + 1``, ... A request may have none: nothing of it is read then. Rows that belong to no
    request stay as they are.

    Args:
        query: ``[T, Hq, D]``, bfloat16, float16 or float32.
        key_cache, value_cache: ``[blocks, block_size, Hkv, D]`` with any strides but D's, which is
            1; of the query's dtype, or float8_e4m3fn (uint8 is taken as that). The nodes' own keys
            and values are in it already. Keys may have `EXTRA_SIZES` channels more than values;
            these may be the keys' first ones, a view of them (MLA).
        tree: A `drafting.growth.NodeQueries`, whose ``max_keys`` sets the number of splits: speed
            and rounding. Where it is ``uneven``, the device decides on them, once for all layers
            that are alike: ``plans`` keeps that. Also ``workspace``, on the same device and of no
            other stream, and ``block_table``, int32 ``[R, max_blocks]``: position p of request r
            lies in block ``block_table[r, p // block_size]``. Nobody sees positions past its
            columns: rows of nodes there get numbers without meaning.
        mask: The tree's. Blocks wholly before its window, at the root, are not read.
        scale: Softmax scale, positive.
        key_scale, value_scale: Factors of what an fp8 cache holds, positive: two floats, or two
            float32 tensors of one element. Not used for other caches.
        output: Like ``query``, as wide as values; its strides may differ.
        context_lse: float32 ``[Hq, T]``, rows of any stride: ``output`` holds the attention
            of each row over its context alone, from another kernel, and this the natural
            log-sum-exp of its scores (-inf: it saw nothing). The tree's nodes are added.
        soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; 0: they stay.
        sinks: Floating ``[Hq]``, contiguous: a score of each head that takes its share of the
            softmax and adds nothing to the output.

    Raises:
        ValueError: For dtypes and shapes other than these; for fp8 on a device that cannot
            convert it; for ``context_lse`` with fp8, a window, a soft cap or sinks.
    """
    if key_cache.dtype == torch.uint8:
        key_cache = key_cache.view(torch.float8_e4m3fn)
        value_cache = value_cache.view(torch.float8_e4m3fn)
    quantized = key_cache.dtype == torch.float8_e4m3fn
    has_own_values = _check_tensors(query, key_cache, value_cache, output)
    if isinstance(key_scale, Tensor) != isinstance(value_scale, Tensor):
        raise ValueError("key_scale and value_scale must be both tensors or both floats")
    workspace: TreeAttentionWorkspace = tree.workspace
    if quantized and workspace.capability < _FP8_CAPABILITY:
        raise ValueError("an fp8 KV cache needs a GPU of compute capability 8.9 or higher")
    (tokens, heads, key_size), head_size = query.shape, output.shape[2]
    if context_lse is not None:
        _check_context_lse(context_lse, [heads, tokens])
        if quantized or mask.window is not None or soft_cap or sinks is not None:
            raise ValueError(
                "fp8, windows, soft caps and sinks are one kernel's: give no context_lse"
            )
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks are {list(sinks.shape)}; expected {[heads]}, contiguous")
    _, block_size, key_heads, _ = key_cache.shape
    requests, group = len(tree.context_lens), heads // key_heads
    nodes, words = mask.words.shape[-2:]
    queries = min(tokens, nodes - tree.first, tree.width)
    if requests == 0 or queries <= 0:
        return
    rows = queries * group
    if context_lse is not None:
        rows = min(rows, _ROWS_OF_NODES)
    tile = choose_tile(
        rows, head_size, query.element_size(), workspace.capability, quantized,
        windowed=mask.window is not None, latent=not has_own_values,
        larger_keys=has_own_values and key_size != head_size,
    )  # fmt: skip
    row_tiles = -(-queries * group // tile.rows)
    units = requests * key_heads * row_tiles
    max_positions = tree.block_table.shape[1] * block_size
    if tree.max_slots is not None:
        max_positions = min(max_positions, tree.max_slots)
    window, most_read = 0, min(max_positions, tree.max_keys)
    if mask.window is not None:
        window = min(mask.window, max_positions + nodes)  # in 32 bits
        most_read = min(most_read, window + nodes + tile.keys)
    is_planned = tree.uneven and context_lse is None
    shared = _shared_constants(group, head_size, tile.keys, mask.window is not None, is_planned)
    plan, splits = None, 1
    if is_planned:
        tiles = min(requests * row_tiles, requests + tokens * group // tile.rows)
        plan = _plan(tree, tile, tiles, key_heads, workspace.rows(head_size), window, shared)
        at_once = len(plan.merged)
        partial_rows = 2 * at_once * key_heads * tile.rows if at_once > 1 else 0
        grid = len(plan.programs), key_heads, 1
        merged_grid, padded_rows = (tile.rows, key_heads, at_once), tile.rows
    else:
        if context_lse is None:
            busy = units
            if tokens < requests * queries:  # few requests have so many rows
                busy = min(units, -(-tokens * group // tile.rows) * key_heads)
            splits = choose_splits(busy, tile, workspace.processors, most_read)
            splits = max(1, min(splits, workspace.rows(head_size) // (units * tile.rows)))
        partial_rows = splits * units * tile.rows if splits > 1 else 0
        grid = row_tiles * splits, key_heads, requests
        merged_grid, padded_rows = (queries * group, key_heads, requests), row_tiles * tile.rows
    partial_output, partial_lse = workspace.partials(partial_rows, head_size)
    none = tree.query_start_loc  # for what a launch does not read
    # By position: each layer's launch would take the host some microseconds more by keywords.
    tree_attention_kernel[grid](
        query, key_cache, value_cache, tree.block_table, tree.context_lens, tree.query_start_loc,
        tree.request_slots, mask.words, mask.depths, key_scale, value_scale, partial_output,
        partial_lse, output, partial_lse if context_lse is None else context_lse,
        query if sinks is None else sinks,
        plan.requests if plan else none, plan.programs if plan else none,
        scale * math.log2(math.e), soft_cap * math.log2(math.e), window, mask.ahead, tree.first,
        splits, row_tiles, max_positions,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3],
        tree.block_table.stride(0), rows_per_slot(mask.words, 2), mask.words.stride(-2),
        output.stride(0), output.stride(1),
        0 if context_lse is None else context_lse.stride(0),
        BLOCK_SIZE=block_size, WORDS=words, QUANTIZED=quantized,
        SCALES_IN_MEMORY=isinstance(key_scale, Tensor), ROWS=tile.rows,
        ONLY_NODES=context_lse is not None, SOFT_CAPPED=bool(soft_cap),
        HAS_SINKS=sinks is not None, EXTRA=key_size - head_size, OWN_VALUES=has_own_values,
        **shared, num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
    )  # fmt: skip
    if partial_rows:
        merge_splits_kernel[merged_grid](
            partial_output, partial_lse, tree.context_lens, tree.query_start_loc, output,
            plan.requests if plan else none, plan.merged if plan else none,
            window, tree.first, splits, padded_rows, output.stride(0), output.stride(1),
            SPLITS_AT_ONCE=_SPLITS_AT_ONCE, **shared, num_warps=4,
        )  # fmt: skip


def _plan(
    tree: Any,
    tile: Tile,
    tiles: int,
    key_heads: int,
    rows: int,
    window: int,
    constants: dict[str, int],
) -> SplitPlan:
    """The plan of layers of this shape, whose partial results have room for so many ``rows``."""
    key = tile, key_heads, window, constants["GROUP"]
    if key not in tree.plans:
        at_once = _programs_at_once(tile, tree.workspace.processors) // key_heads
        at_once = max(1, min(at_once, rows // (2 * key_heads * tile.rows)))
        tree.plans[key] = SplitPlan.launch(tree, tile.rows, tiles, at_once, window, constants)
    return tree.plans[key]


@cache
def _shared_constants(
    group: int, head_size: int, keys: int, windowed: bool, planned: bool
) -> dict[str, int]:
    """Constants that both kernels are compiled with."""
    return {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD_SIZE": triton.next_power_of_2(head_size),
        "KEYS": keys,
        "MIN_BLOCKS": MIN_POSITIONS_PER_SPLIT // keys,
        "WINDOWED": windowed,
        "PLANNED": planned,
        "COLUMNS": PLAN_COLUMNS,
    }


def _check_tensors(query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor) -> bool:
    """Refuses what does not fit; tells whether values are other memory than their keys."""
    if query.dtype not in _QUERY_DTYPES:
        raise ValueError(f"queries are {query.dtype}; expected one of {_QUERY_DTYPES}")
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(f"a cache of {key_cache.dtype} does not fit queries of {query.dtype}")
    key_heads, head_size = key_cache.shape[2:]
    value_size = value_cache.shape[3]
    extra = head_size - value_size
    if extra and extra not in EXTRA_SIZES:
        raise ValueError(f"keys have {extra} channels more than values: not in {EXTRA_SIZES}")
    if (key_cache.shape[:3], key_cache.dtype) != (value_cache.shape[:3], value_cache.dtype):
        raise ValueError("key and value cache differ in shape or dtype")
    if (output.shape, output.dtype) != ((*query.shape[:2], value_size), query.dtype):
        raise ValueError("output and query differ in shape or dtype")
    if query.shape[2] != head_size or query.shape[1] % key_heads:
        raise ValueError(
            f"queries {list(query.shape)} do not fit a cache of {list(key_cache.shape)}"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, key_cache, value_cache, output)):
        raise ValueError("a head's numbers must lie side by side (last stride 1)")
    where = [(each.data_ptr(), each.stride()) for each in (key_cache, value_cache)]
    return not extra or where[0] != where[1]


def _check_context_lse(context_lse: Tensor, shape: list[int]) -> None:
    if context_lse.dtype != torch.float32 or list(context_lse.shape) != shape:
        raise ValueError(
            f"context_lse is {context_lse.dtype} {list(context_lse.shape)}; "
            f"expected float32 {shape}"
        )
    if context_lse.stride(1) != 1:
        raise ValueError("a head's log-sum-exps must lie side by side (last stride 1)")
