"""Calls `tree_attention` for batches of random requests in a paged cache."""

from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.kernels.chunks import from_chunk
from sequoia_vllm.kernels.node_masks import NodeMask
from sequoia_vllm.kernels.tree_attention import (
    TreeAttentionWorkspace,
    choose_splits,
    choose_tile,
    tree_attention,
)
from tests.oracles.attention import (
    dense_attention,
    gathered,
    random_ancestors,
    tree_attention_reference,
)

UNTOUCHED = 7.0
_FP8_NAN = 0x7F  # of float8_e4m3fn


class Batch:
    """Random requests in a paged cache whose unused positions hold NaN.

    With `extra`, keys have so many channels more than their values, which are the keys' first ones
    (latents), unless it `has_values`. `keys` and `values` are those of the first of its `layers`.
    With `is_block` all nodes see one another.
    """

    def __init__(
        self, contexts: Sequence[int], sizes: Sequence[int], *, nodes: int | None = None,
        first_node: int = 0, heads: tuple[int, int] = (4, 2), head_size: int = 64,
        block_size: int = 16, dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None, seed: int = 0, spare_blocks: int = 2,
        extra: int = 0, layers: int = 1, device: torch.device | str = "cpu",
        is_block: bool = False, has_values: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device).manual_seed(seed)
        nodes = nodes or max([*sizes, 1]) + first_node
        self.ancestors = random_ancestors(nodes, torch.Generator().manual_seed(seed)).to(device)
        if is_block:
            self.ancestors = torch.ones_like(self.ancestors)
        self.slots = torch.arange(len(contexts), device=device)
        self.first_node = first_node
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device=device)
        starts = [0, *accumulate(sizes)]
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        ends = [c + first_node + q if q else 0 for c, q in zip(contexts, sizes, strict=True)]
        columns = -(-max(ends) // block_size) + spare_blocks
        blocks = torch.randperm(len(contexts) * columns + 1, generator=generator, device=device)
        self.table = blocks[:-1].view(len(contexts), columns).to(torch.int32)
        parts, key_size = 1 if extra and not has_values else 2, head_size + extra
        shape = (len(blocks), heads[1], parts, block_size, key_size)
        self.layers = []
        for _ in range(layers):
            cache = _random(shape, cache_dtype or dtype, generator)
            # The layout is neither contiguous nor [blocks, block_size, heads, size] in memory.
            keys, values = (cache[:, :, i].transpose(1, 2) for i in (0, -1))
            self.layers.append((keys, values[..., :head_size]))
        self.keys, self.values = self.layers[0]
        self.forget_from(ends)
        for cache in (self.keys, self.values):
            _fill_with_nan(cache, blocks[-1:], slice(None))
        packed = _random((starts[-1] + 3, heads[0] + 2, key_size), dtype, generator)
        self.query = packed[:, :-2]
        self.scale = key_size**-0.5

    def give_own_trees(self, seed: int = 1) -> None:
        """Each request slot has a tree of its own, and requests have slots in any order."""
        generator = torch.Generator().manual_seed(seed)
        self.slots = torch.randperm(len(self.contexts) + 2, generator=generator)[:-2]
        nodes = len(self.ancestors)
        self.ancestors = torch.stack(
            [random_ancestors(nodes, generator) for _ in range(len(self.slots) + 2)]
        )

    def only(self, request: int) -> "Batch":
        """A batch of this request alone, in the same cache."""
        found, one = copy(self), slice(request, request + 1)
        found.contexts, found.table, found.slots = (
            self.contexts[one],
            self.table[one],
            self.slots[one],
        )
        found.query = self.query[self.starts[request] :]
        found.starts = self.starts[request : request + 2] - self.starts[request]
        return found

    def attend_to_contexts(self) -> tuple[Tensor, Tensor]:
        """Attention over contexts alone, and its log-sum-exps ``[Hq, T]``, as of another kernel."""
        output = torch.full_like(self.query, UNTOUCHED)
        lse = torch.full((self.query.shape[1] + 1, len(output) + 2), float("nan"))[1:, :-2]
        for request, context in enumerate(self.contexts.tolist()):
            rows = slice(*self.starts[request : request + 2].tolist())
            if rows.start == rows.stop:
                continue
            keys, values = (
                gathered(cache, self.table[request], context) for cache in (self.keys, self.values)
            )
            attended, lse[:, rows] = dense_attention(self.query[rows], keys, values, self.scale)
            output[rows] = attended.to(output.dtype)
        return output, lse

    def run(self, processors: int | None = 1, continued: bool = False, **arguments: Any) -> Tensor:
        if continued:
            output, arguments["context_lse"] = self.attend_to_contexts()
            arguments["output"] = output
        attend = self.attending(processors, **arguments)
        attend(self.keys, self.values)
        found: Tensor = attend.keywords["output"]
        return found.float()

    def attending(
        self, processors: int | None = None, ancestors: Tensor | None = None,
        window: int | None = None, max_queries: int = 1 << 20, max_slots: int | None = None,
        max_keys: int = 1 << 40, uneven: bool = False, output: Tensor | None = None,
        chunk: int | None = None, **arguments: Any,
    ) -> partial[None]:  # fmt: skip
        """`tree_attention` of a layer's keys and values, which it is called with.

        `processors`: None: as many as the device has.
        """
        value_size = self.values.shape[3]
        if output is None:
            output = torch.full_like(self.query[..., :value_size], UNTOUCHED)
        workspace = TreeAttentionWorkspace(value_size, self.query.device, processors)
        workspace._memory.fill_(float("nan"))  # what no split wrote must not be read
        mask = NodeMask.of(self.ancestors if ancestors is None else ancestors, window)
        tree = SimpleNamespace(
            request_slots=self.slots, context_lens=self.contexts, query_start_loc=self.starts,
            first=self.first_node, width=max_queries, max_keys=max_keys, max_slots=max_slots,
            block_table=self.table, workspace=workspace, uneven=uneven, plans={},
        )  # fmt: skip
        if chunk is not None:
            vars(tree).update(from_chunk(tree, mask, chunk, self.keys.shape[1]))
            mask = tree.mask
        scales = {"scale": self.scale, "key_scale": 1.0, "value_scale": 1.0}
        return partial(
            tree_attention, self.query, tree=tree, mask=mask, output=output,
            **{**scales, **arguments},
        )  # fmt: skip

    def splits(self, processors: int) -> int:
        """How many splits `tree_attention` chooses for the batch."""
        _, heads, head_size = self.query.shape
        _, block_size, key_heads, _ = self.keys.shape
        rows = (len(self.ancestors) - self.first_node) * heads // key_heads
        tile = choose_tile(rows, head_size, self.query.element_size(), 90)
        units = len(self.contexts) * key_heads * -(-rows // tile.rows)
        return choose_splits(units, tile, processors, self.table.shape[1] * block_size)

    def drop_blocks_before(self, window: int | None = None, chunk: int | None = None) -> None:
        """Gives each request's blocks before its root's window, or chunk, to somebody else."""
        size = self.keys.shape[1]
        for row, context in zip(self.table, self.contexts.tolist(), strict=True):
            first = context // chunk * chunk if chunk else max(0, context - (window or 0) + 1)
            gone = first // size
            for cache in (self.keys, self.values):
                cache[row[:gone].long()] = float("nan")
            row[:gone] = len(self.keys) - 1  # as vLLM's null block: one for all
            beyond = torch.arange(gone * size, first)
            for cache in (self.keys, self.values):
                _fill_with_nan(cache, row[beyond // size].long(), beyond % size)

    def forget_from(self, ends: Sequence[int]) -> None:
        """Nobody has written what lies from these positions of the requests on."""
        size = self.keys.shape[1]
        for row, end in zip(self.table, ends, strict=True):
            positions = torch.arange(end, len(row) * size, device=row.device)
            for cache in (self.keys, self.values):
                _fill_with_nan(cache, row[positions // size].long(), positions % size)

    def expected(self, **scales: Any) -> Tensor:
        ancestors = self.ancestors if self.ancestors.ndim == 2 else self.ancestors[self.slots]
        return tree_attention_reference(
            self.query, self.keys, self.values, self.table, self.contexts.tolist(),
            self.starts.tolist(), ancestors, self.first_node, self.scale,
            elsewhere=UNTOUCHED, **scales,
        )  # fmt: skip


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normally distributed, on the generator's device."""
    drawn = torch.empty(
        shape, dtype=dtype if dtype.itemsize > 1 else torch.bfloat16, device=generator.device
    )
    return drawn.normal_(generator=generator).to(dtype)


def _fill_with_nan(cache: Tensor, blocks: Tensor, places: Tensor | slice) -> None:
    if cache.dtype.itemsize == 1:  # not every torch can index fp8
        cache.view(torch.uint8)[blocks, places] = _FP8_NAN
    else:
        cache[blocks, places] = float("nan")
