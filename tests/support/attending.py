"""Calls `tree_attention` for batches of random requests in a paged cache."""

from types import SimpleNamespace

import torch

from sequoia_vllm.kernels.node_masks import NodeMask
from sequoia_vllm.kernels.tree_attention import TreeAttentionWorkspace, tree_attention
from tests.oracles.attention import (
    dense_attention,
    gathered,
    random_ancestors,
    tree_attention_reference,
)

UNTOUCHED = 7.0


class Batch:
    """Random requests in a paged cache whose unused positions hold NaN.

    With `extra`, the cache holds latents: keys of so many channels more than their values.
    """

    def __init__(
        self, contexts, sizes, *, nodes=None, first_node=0, heads=(4, 2), head_size=64,
        block_size=16, dtype=torch.float32, cache_dtype=None, seed=0, spare_blocks=2,
        extra=0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        nodes = nodes or max([*sizes, 1]) + first_node
        self.ancestors = random_ancestors(nodes, generator)
        self.slots = torch.arange(len(contexts))
        self.first_node = first_node
        self.contexts = torch.tensor(contexts, dtype=torch.int32)
        self.starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        ends = [c + first_node + q if q else 0 for c, q in zip(contexts, sizes, strict=True)]
        columns = -(-max(ends) // block_size) + spare_blocks
        blocks = torch.randperm(len(contexts) * columns + 1, generator=generator)[:-1]
        self.table = blocks.view(len(contexts), columns).to(torch.int32)
        parts, key_size = 1 if extra else 2, head_size + extra
        shape = (len(blocks) + 1, heads[1], parts, block_size, key_size)
        cache = torch.full(shape, float("nan"))
        for row, end in zip(self.table.tolist(), ends, strict=True):
            for position in range(end):
                entry = torch.randn(heads[1], parts, key_size, generator=generator)
                cache[row[position // block_size], :, :, position % block_size] = entry
        # The layout is neither contiguous nor [blocks, block_size, heads, size] in memory.
        cache = cache.to(cache_dtype or dtype)
        self.keys, self.values = (cache[:, :, i].transpose(1, 2) for i in (0, -1))
        self.values = self.values[..., :head_size]
        tokens = int(self.starts[-1]) + 3
        packed = torch.randn(tokens, heads[0] + 2, key_size, generator=generator)
        self.query = packed.to(dtype)[:, :-2]
        self.scale = key_size**-0.5

    def give_own_trees(self, seed=1):
        """Each request slot has a tree of its own, and requests have slots in any order."""
        generator = torch.Generator().manual_seed(seed)
        self.slots = torch.randperm(len(self.contexts) + 2, generator=generator)[:-2]
        nodes = len(self.ancestors)
        self.ancestors = torch.stack(
            [random_ancestors(nodes, generator) for _ in range(len(self.slots) + 2)]
        )

    def attend_to_contexts(self):
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

    def run(
        self, processors=1, ancestors=None, continued=False, window=None, max_queries=1 << 20,
        max_slots=None, max_keys=1 << 40, **arguments,
    ):  # fmt: skip
        value_size = self.values.shape[3]
        output = torch.full_like(self.query[..., :value_size], UNTOUCHED)
        if continued:
            output, arguments["context_lse"] = self.attend_to_contexts()
        workspace = TreeAttentionWorkspace(value_size, "cpu", processors)
        workspace._memory.fill_(float("nan"))  # what no split wrote must not be read
        mask = NodeMask.of(self.ancestors if ancestors is None else ancestors, window)
        tree = SimpleNamespace(
            request_slots=self.slots, context_lens=self.contexts, query_start_loc=self.starts,
            first=self.first_node, width=max_queries, max_keys=max_keys, max_slots=max_slots,
            block_table=self.table, workspace=workspace,
        )  # fmt: skip
        scales = {"scale": self.scale, "key_scale": 1.0, "value_scale": 1.0}
        tree_attention(
            self.query, self.keys, self.values, tree, mask, output=output, **{**scales, **arguments}
        )
        return output.float()

    def drop_blocks_before(self, window):
        """Gives each request's blocks that lie before its root's window to somebody else."""
        size = self.keys.shape[1]
        for row, context in zip(self.table, self.contexts.tolist(), strict=True):
            gone = max(0, context - window + 1) // size
            for cache in (self.keys, self.values):
                cache[row[:gone].long()] = float("nan")
            row[:gone] = len(self.keys) - 1  # as vLLM's null block: one for all

    def forget_from(self, ends):
        """Nobody has written what lies from these positions of the requests on."""
        size = self.keys.shape[1]
        for row, end in zip(self.table.tolist(), ends, strict=True):
            for position in range(end, len(row) * size):
                for cache in (self.keys, self.values):
                    cache[row[position // size], position % size] = float("nan")

    def expected(self, **scales):
        ancestors = self.ancestors if self.ancestors.ndim == 2 else self.ancestors[self.slots]
        return tree_attention_reference(
            self.query, self.keys, self.values, self.table, self.contexts.tolist(),
            self.starts.tolist(), ancestors, self.first_node, self.scale,
            elsewhere=UNTOUCHED, **scales,
        )  # fmt: skip
