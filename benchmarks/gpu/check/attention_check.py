"""Tree attention against its reference, and against the device's bandwidth."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.gpu.check.paged import PagedCache
from benchmarks.gpu.check.stage import KernelRun
from benchmarks.gpu.check.timing import copy_bytes_per_second
from sequoia_vllm.kernels.node_masks import NodeMask
from sequoia_vllm.kernels.tree_attention import TreeAttentionWorkspace, tree_attention
from tests.oracles.attention import random_ancestors, tree_attention_reference

# A row's error over its norm: so many units in the last place of the output's dtype.
_ROW_ERROR = 2.0
_FLOAT32_ERROR = 2e-5
# Caches of a timing, together: more than any L2 cache several times over.
_ROTATED_BYTES = 1 << 30
_MOST_LAYERS = 64
_FP8_SCALES = (0.5, 1.5)


@dataclass(frozen=True)
class Heads:
    """Attention of one model's layers."""

    shape: str
    heads: int
    kv_heads: int
    head_size: int


LLAMA_2_7B = Heads("llama-2-7b", 32, 32, 128)
LLAMA_3_8B = Heads("llama-3-8b", 32, 8, 128)
LLAMA_68M = Heads("llama-68m", 12, 12, 64)
TINY = Heads("tiny", 4, 2, 32)
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A batch whose requests have ``sizes`` nodes after ``contexts`` committed tokens.

    Its layer may have a window, a soft cap and sinks (`tree_attention`).
    """

    heads: Heads
    dtype: torch.dtype
    cache_dtype: torch.dtype
    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    first_node: int = 0
    window: int | None = None
    soft_cap: float = 0.0
    has_sinks: bool = False

    @property
    def name(self) -> str:
        """For the report."""
        dtypes = f"{short(self.dtype)}, {short(self.cache_dtype)} cache"
        more = [f", window {self.window}"] if self.window else []
        more += [f", soft cap {self.soft_cap:g}"] if self.soft_cap else []
        more += [", sinks"] if self.has_sinks else []
        return (
            f"tree attention {self.heads.shape} {dtypes}, contexts {list(self.contexts)}, "
            f"nodes {list(self.sizes)} from {self.first_node}{''.join(more)}"
        )


def short(dtype: torch.dtype) -> str:
    """A dtype's name."""
    return str(dtype).removeprefix("torch.")


def some_ancestors(nodes: int) -> Tensor:
    """bool ``[nodes, nodes]`` of a tree whose nodes have earlier parents: always the same."""
    return random_ancestors(nodes, torch.Generator().manual_seed(0))


def check_attention(run: KernelRun) -> None:
    """All cases, each with fresh random inputs; unused cache is NaN."""
    for case in _cases(run):
        with run.attempt(case.name):
            run.check(case.name, _worst_row(run, case), _limit(case.dtype))


def _limit(dtype: torch.dtype) -> float:
    return _FLOAT32_ERROR if dtype == torch.float32 else _ROW_ERROR * torch.finfo(dtype).eps


def _cases(run: KernelRun) -> list[Case]:
    if run.tiny:
        return [
            # Triton's interpreter cannot multiply bfloat16.
            Case(TINY, torch.float32, torch.float32, (40, 0, 17), (9, 0, 5)),
            Case(TINY, torch.float16, torch.float16, (300,), (4,), first_node=3),
            Case(TINY, torch.float32, _FP8, (33,), (6,)),
            Case(TINY, torch.float32, torch.float32, (150, 0), (9, 5), 0, 70, 2.0, True),
        ]
    bf16, fp16 = torch.bfloat16, torch.float16
    mixed = ((0, 31, 700, 4096, 1), (1, 64, 0, 33, 128))
    cases = [
        Case(heads, dtype, cache, *mixed)
        for heads in (LLAMA_2_7B, LLAMA_3_8B, LLAMA_68M)
        for dtype, cache in ((bf16, bf16), (fp16, fp16), (bf16, _FP8), (fp16, _FP8))
        if cache != _FP8 or _has_fp8()
    ]
    cases += [
        Case(heads, bf16, bf16, (context,), (nodes,))
        for heads in (LLAMA_2_7B, LLAMA_3_8B)
        for context, nodes in ((512, 16), (8192, 64), (8191, 256), (2048, 768))
    ]
    cases += [
        Case(heads, dtype, dtype, *mixed, 0, window, soft_cap, has_sinks)
        for heads, dtype in ((LLAMA_3_8B, bf16), (LLAMA_68M, fp16))
        for window, soft_cap, has_sinks in (
            (128, 0.0, False), (1024, 50.0, False), (None, 3.0, False), (128, 0.0, True),
        )
    ]  # fmt: skip
    return [
        *cases,
        Case(LLAMA_68M, torch.float32, torch.float32, (257, 0), (40, 7)),
        Case(LLAMA_68M, bf16, bf16, (1000, 63), (12, 5), first_node=37),
        Case(Heads("head size 80", 6, 2, 80), bf16, bf16, (513,), (21,)),
        Case(Heads("head size 256", 8, 4, 256), bf16, bf16, (513,), (48,)),
    ]


def _has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def _worst_row(run: KernelRun, case: Case) -> float:
    """The largest error of a row of one head, over the row's norm."""
    device, heads = run.machine.device, case.heads
    generator = torch.Generator(device).manual_seed(sum(case.sizes) + sum(case.contexts))
    ends = [
        context + case.first_node + size if size else 0
        for context, size in zip(case.contexts, case.sizes, strict=True)
    ]
    cache = PagedCache(
        1, len(ends), max(ends) + 40, heads.kv_heads, heads.head_size, case.cache_dtype, generator
    )
    cache.poison(ends)
    starts = [0, *torch.tensor(case.sizes).cumsum(0).tolist()]
    shape = (starts[-1], heads.heads, heads.head_size)
    query = torch.empty(shape, dtype=case.dtype, device=device).normal_(generator=generator)
    ancestors = some_ancestors(case.first_node + max(case.sizes)).to(device)
    quantized = case.cache_dtype == _FP8
    scales = _FP8_SCALES if quantized else (1.0, 1.0)
    keys, values = cache.keys_and_values(0)
    output = torch.full_like(query, float("nan"))
    contexts, query_start_loc = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in (case.contexts, starts)
    )
    scale = heads.head_size**-0.5
    sinks = None
    if case.has_sinks:
        sinks = torch.empty(heads.heads, dtype=case.dtype, device=device)
        sinks.normal_(0, 3, generator=generator)
    tree_attention(
        query, keys, values,
        _tree(cache, heads.head_size, contexts, query_start_loc, len(ancestors), case.first_node),
        NodeMask.of(ancestors, case.window),
        scale=scale,
        key_scale=torch.tensor(scales[0], device=device),
        value_scale=torch.tensor(scales[1], device=device),
        output=output,
        soft_cap=case.soft_cap,
        sinks=sinks,
    )  # fmt: skip
    expected = tree_attention_reference(
        query, keys, values, cache.block_table, case.contexts, starts, ancestors,
        case.first_node, scale, *scales, window=case.window, soft_cap=case.soft_cap, sinks=sinks,
    )  # fmt: skip
    return float(((output.float() - expected).norm(dim=2) / expected.norm(dim=2)).max())


def _tree(
    cache: PagedCache, head_size: int, contexts: Tensor, starts: Tensor, nodes: int, first: int = 0
) -> SimpleNamespace:
    """What `tree_attention` needs of trees with so many nodes."""
    return SimpleNamespace(
        request_slots=torch.arange(len(contexts), device=contexts.device), context_lens=contexts,
        query_start_loc=starts, first=first, width=nodes - first, max_slots=None,
        max_keys=cache.positions,
        block_table=cache.block_table, workspace=TreeAttentionWorkspace(head_size, contexts.device),
    )  # fmt: skip


# -- times --------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedShape:
    """What is timed."""

    heads: Heads
    dtype: torch.dtype
    cache_dtype: torch.dtype
    batch_size: int
    context_length: int
    nodes: int

    @property
    def bytes_read(self) -> int:
        """Keys and values of all positions, once."""
        positions = self.batch_size * (self.context_length + self.nodes)
        return (
            positions * self.heads.kv_heads * 2 * self.heads.head_size * self.cache_dtype.itemsize
        )

    @property
    def name(self) -> str:
        """For the report."""
        return (
            f"time of tree attention {self.heads.shape}, {short(self.cache_dtype)} cache, batch "
            f"{self.batch_size}, context {self.context_length}, {self.nodes} nodes"
        )


def time_attention(run: KernelRun) -> None:
    """Times all shapes that fit the memory, beside the time in which a copy moves their bytes."""
    copy_rate = copy_bytes_per_second(run.machine, run.timer)
    for shape in _timed_shapes(run):
        if 2.5 * shape.bytes_read <= run.machine.free_bytes:
            with run.attempt(shape.name):
                _time_shape(run, shape, copy_rate)


def _timed_shapes(run: KernelRun) -> list[TimedShape]:
    if run.tiny:
        return [TimedShape(TINY, torch.float32, torch.float32, 2, 40, 5)]
    shapes = (LLAMA_2_7B, LLAMA_3_8B)
    bf16 = torch.bfloat16
    timed = [
        TimedShape(heads, bf16, bf16, batch, context, nodes)
        for heads, batch in product(shapes, (1, 8))
        for context, nodes in product((512, 2048, 8192, 32768), (16, 64, 256, 768))
    ]
    if _has_fp8():
        timed += [
            TimedShape(heads, bf16, _FP8, batch, 8192, 64)
            for heads, batch in product(shapes, (1, 8))
        ]
    return timed


def _time_shape(run: KernelRun, shape: TimedShape, copy_rate: float) -> None:
    device, heads = run.machine.device, shape.heads
    generator = torch.Generator(device).manual_seed(1)
    positions = shape.context_length + shape.nodes
    fitting = max(1, int(0.4 * run.machine.free_bytes / shape.bytes_read))
    layers = min(fitting, _MOST_LAYERS, max(2, -(-_ROTATED_BYTES // shape.bytes_read)))
    layers = 2 if run.tiny else layers
    cache = PagedCache(
        layers, shape.batch_size, positions, heads.kv_heads, heads.head_size,
        shape.cache_dtype, generator,
    )  # fmt: skip
    rows = shape.batch_size * shape.nodes
    query = torch.empty(
        rows, heads.heads, heads.head_size, dtype=shape.dtype, device=device
    ).normal_(generator=generator)
    output = torch.empty_like(query)
    context_lens = torch.full((shape.batch_size,), shape.context_length, dtype=torch.int32).to(
        device
    )
    starts = torch.arange(shape.batch_size + 1, dtype=torch.int32).to(device) * shape.nodes
    mask = NodeMask.of(some_ancestors(shape.nodes).to(device))
    tree = _tree(cache, heads.head_size, context_lens, starts, shape.nodes)
    scale = heads.head_size**-0.5

    def attend(layer: int) -> None:
        keys, values = cache.keys_and_values(layer)
        tree_attention(
            query, keys, values, tree, mask, scale=scale, key_scale=1.0, value_scale=1.0,
            output=output,
        )  # fmt: skip

    works = [partial(attend, layer) for layer in range(layers)]
    run.time(shape.name, works, bandwidth_floor=shape.bytes_read / copy_rate)
