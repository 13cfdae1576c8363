"""Tree attention against its reference, and against the device's bandwidth."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.check.stage import KernelRun
from tests.support.attending import Batch

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

    @property
    def timed_name(self) -> str:
        """For the report of times, where all requests are alike."""
        return (
            f"time of tree attention {self.heads.shape}, {short(self.cache_dtype)} cache, batch "
            f"{len(self.sizes)}, context {self.contexts[0]}, {self.sizes[0]} nodes"
        )

    @property
    def bytes_read(self) -> int:
        """Keys and values of all positions, once."""
        positions, heads = sum(self.contexts) + sum(self.sizes), self.heads
        return positions * heads.kv_heads * 2 * heads.head_size * self.cache_dtype.itemsize


def short(dtype: torch.dtype) -> str:
    """A dtype's name."""
    return str(dtype).removeprefix("torch.")


def check_attention(run: KernelRun) -> None:
    """All cases, each with fresh random inputs; unused cache is NaN."""
    for case in _cases(run):
        with run.attempt(case.name):
            epsilon = torch.finfo(case.dtype).eps
            limit = _FLOAT32_ERROR if case.dtype == torch.float32 else _ROW_ERROR * epsilon
            run.check(case.name, _worst_row(run, case), limit)


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


def _batch(run: KernelRun, case: Case, **cache: Any) -> Batch:
    """A case's queries, trees, and a cache; the same each time."""
    heads, seed = case.heads, sum(case.sizes) + sum(case.contexts)
    return Batch(
        case.contexts, case.sizes, first_node=case.first_node, heads=(heads.heads, heads.kv_heads),
        head_size=heads.head_size, dtype=case.dtype, cache_dtype=case.cache_dtype, seed=seed,
        device=run.machine.device, **cache,
    )  # fmt: skip


def _worst_row(run: KernelRun, case: Case) -> float:
    """The largest error of a row of one head, over the row's norm."""
    batch, device = _batch(run, case), run.machine.device
    how: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap, "sinks": None}
    if case.has_sinks:
        how["sinks"] = torch.linspace(-6, 6, case.heads.heads, dtype=case.dtype, device=device)
    scales = _FP8_SCALES if case.cache_dtype == _FP8 else (1.0, 1.0)
    named = dict(zip(("key_scale", "value_scale"), scales, strict=True))
    expected = batch.expected(**how, **named)
    on_device = {name: torch.tensor(scale, device=device) for name, scale in named.items()}
    rows = slice(sum(case.sizes))
    expected, worst = expected[rows], 0.0
    for uneven in (False, True):  # programs shared by the host, and by the device
        found = batch.run(None, uneven=uneven, **how, **on_device)[rows]
        errors = (found - expected).norm(dim=2) / expected.norm(dim=2)
        worst = max(worst, float(errors.max()))
    return worst


# -- times --------------------------------------------------------------------------


def time_attention(run: KernelRun) -> None:
    """Times all cases that fit the memory, beside the time in which a copy moves their bytes."""
    copy_rate = run.copy_bytes_per_second()
    for case in _timed_cases(run):
        if 2.5 * case.bytes_read <= run.machine.free_bytes:
            with run.attempt(case.timed_name):
                _time_case(run, case, copy_rate)


def _timed_cases(run: KernelRun) -> list[Case]:
    def case(
        heads: Heads, dtype: torch.dtype, cache: torch.dtype, batch: int, context: int, nodes: int
    ) -> Case:
        return Case(heads, dtype, cache, (context,) * batch, (nodes,) * batch)

    if run.tiny:
        return [case(TINY, torch.float32, torch.float32, 2, 40, 5)]
    shapes = (LLAMA_2_7B, LLAMA_3_8B)
    bf16 = torch.bfloat16
    timed = [
        case(heads, bf16, bf16, batch, context, nodes)
        for heads, batch in product(shapes, (1, 8))
        for context, nodes in product((512, 2048, 8192, 32768), (16, 64, 256, 768))
    ]
    if _has_fp8():
        timed += [
            case(heads, bf16, _FP8, batch, 8192, 64) for heads, batch in product(shapes, (1, 8))
        ]
    return timed


def _time_case(run: KernelRun, case: Case, copy_rate: float) -> None:
    fitting = max(1, int(0.4 * run.machine.free_bytes / case.bytes_read))
    layers = min(fitting, _MOST_LAYERS, max(2, -(-_ROTATED_BYTES // case.bytes_read)))
    layers = 2 if run.tiny else layers
    batch = _batch(run, case, layers=layers, spare_blocks=0)
    attend = batch.attending()
    works = [partial(attend, keys, values) for keys, values in batch.layers]
    run.time(case.timed_name, works, bandwidth_floor=case.bytes_read / copy_rate)
