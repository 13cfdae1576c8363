"""The device's work of a drafting pass: read what was committed, then grow level by level.

Everything is read from `DraftBatch` and other buffers that stay in place, and
nothing depends on values that only the device knows: a CUDA graph may hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.levels import DraftLevels, Level
from sequoia_vllm.engine.v2.backend import DraftQueries, TreeBackend
from sequoia_vllm.kernels.children import DrawWorkspace, draw_children
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables

Forward = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Tensor], None], Tensor]
"""(token ids, positions, attention metadata, slots by layer, None) -> hidden states."""


@dataclass(frozen=True)
class DraftedTrees:
    """What the verifier needs to know of the drafts, for all request slots.

    Attributes:
        nodes: int32 ``[slots]``: nodes drafted, root included; 0: none.
        rows: int32 ``[slots]``: the request's first row of the two tensors below.
        logits: ``[rows, I, V]``: draft logits of the nodes with children. Row r has its
            node i where row r + i has its first: trees of a batch follow one another,
            each with as many rows as it has such nodes.
        stats: float32 ``[rows, I, 2]``: maximum and sum that make them Q, likewise.
    """

    nodes: Tensor
    rows: Tensor
    logits: Tensor
    stats: Tensor

    @classmethod
    def empty(
        cls, slots: int, rows: int, inner: int, vocab_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> DraftedTrees:  # fmt: skip
        """No drafts yet.

        Args:
            slots: Request slots of the engine.
            rows: Nodes with children, of all trees of a batch.
            inner: Nodes with children of the largest tree.
            vocab_size: Of the draft.
            dtype: Of its logits.
            device: Where it all is.
        """
        logits = torch.zeros(rows + inner - 1, vocab_size, dtype=dtype, device=device)
        stats = torch.ones(rows + inner - 1, 2, dtype=torch.float32, device=device)
        return cls(
            nodes=torch.zeros(slots, dtype=torch.int32, device=device),
            rows=torch.zeros(slots, dtype=torch.int32, device=device),
            logits=logits.as_strided((rows, inner, vocab_size), (vocab_size, vocab_size, 1)),
            stats=stats.as_strided((rows, inner, 2), (2, 2, 1)),
        )


@dataclass(frozen=True)
class DraftCache:
    """The draft's part of the paged KV cache.

    Attributes:
        block_tables: vLLM's, gathered for the batch by the target's pass.
        groups: Index of the cache group of each draft layer.
        slot_mappings: int64 ``[groups, rows]``: a buffer of the draft's own.
    """

    block_tables: BlockTables
    groups: dict[str, int]
    slot_mappings: Tensor

    def slots(
        self, requests: Tensor, query_start_loc: Tensor, positions: Tensor, has_slot: Tensor
    ) -> Tensor:
        """Slots int64 ``[groups, rows]`` of these positions; -1 where there is none.

        Args:
            requests: int64 ``[R]``: request slots; -1: none.
            query_start_loc: int32 ``[R + 1]``: rows of each request.
            positions: ``[rows]``.
            has_slot: bool ``[rows]``.
        """
        slots = self.block_tables.compute_slot_mappings(
            requests,
            query_start_loc,
            torch.where(has_slot, positions, 0).long(),
            len(positions),
            out=self.slot_mappings,
        )
        return slots.masked_fill_(~has_slot, PAD_SLOT_ID)

    def by_layer(self, slots: Tensor) -> dict[str, Tensor]:
        """Each draft layer's row of such slots."""
        return {name: slots[group] for name, group in self.groups.items()}

    def inputs(self, max_requests: int) -> DraftInputs:
        """Buffers for passes with as many rows per request, as many rows as slots."""
        tables = PagedTables.of(self.block_tables.input_block_tables, self.block_tables.block_sizes)
        return DraftInputs.empty(tables, self.slot_mappings.shape[1], max_requests)


class TreeGrowth:
    """Grows the trees of a batch.

    Attributes:
        tokens: int64 ``[max_num_reqs, size]``: drafted tokens in stored order;
            column 0 is not used.

    Args:
        batch: The requests.
        drafted: Where Q is kept.
        cache: The draft's cache.
        backend: The device's attention.
        forward: Runs the draft model.
        compute_logits: Its LM head.
        token_ids: int32 ``[slots, max_model_len]``: tokens of each request.
        max_lens: Longest request of the engine, and of the draft.
        size, depth: Of the engine's tree.
    """

    def __init__(
        self,
        batch: DraftBatch,
        drafted: DraftedTrees,
        cache: DraftCache,
        backend: TreeBackend,
        forward: Forward,
        compute_logits: Callable[[Tensor], Tensor],
        token_ids: Tensor,
        max_lens: tuple[int, int],
        size: int,
        depth: int,
    ) -> None:
        device, max_num_reqs = batch.slots.device, len(batch.slots)
        self._batch = batch
        self._drafted = drafted
        self._cache = cache
        self._backend = backend
        self._forward = forward
        self._compute_logits = compute_logits
        self._token_ids = token_ids
        self._max_model_len, self._draft_max_len = max_lens
        self._workspace = DrawWorkspace()
        self._inputs = cache.inputs(max_num_reqs)
        self.tokens = torch.zeros(max_num_reqs, size, dtype=torch.int64, device=device)
        self._places = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)
        self._all_multiples: dict[int, Tensor] = {}
        # A few new tokens are a tree without branches below what the draft has read.
        self._chain = torch.ones(depth + 1, depth + 1, dtype=torch.bool, device=device).tril_()

    def read_and_grow(self, num_reqs: int, levels: DraftLevels, max_keys: int) -> None:
        """Reads up to `chain_width` committed tokens of each request, and grows its tree."""
        batch, width = self._batch, chain_width(levels)
        starts = batch.starts[:num_reqs]
        self._inputs.read_committed(
            requests=batch.slots[:num_reqs],
            starts=starts,
            counts=batch.counts[:num_reqs],
            all_token_ids=self._token_ids,
            width=width,
            longest=self._draft_max_len,
        )
        hidden = self._forward_inputs(
            DraftQueries(
                context_lens=starts,
                first=0,
                width=width,
                ancestors=self._chain,
                max_keys=min(max_keys + width, self._max_model_len),
                max_slots=self._max_model_len,
            ),
        )
        roots = hidden.index_select(0, self._inputs.last_rows[:num_reqs])
        self.grow(num_reqs, levels, roots, max_keys)

    def grow(self, num_reqs: int, levels: DraftLevels, root_hidden: Tensor, max_keys: int) -> None:
        """Draws the children of the roots, then of each level below.

        Args:
            num_reqs: Requests of the batch, R.
            levels: The tree to grow.
            root_hidden: ``[R, H]``: the draft's hidden state at each root.
            max_keys: No request has more committed tokens.
        """
        batch = self._batch
        hidden = root_hidden
        first_rows = self._multiples(levels.num_inner)[:num_reqs]
        for level in levels.levels:
            if level.depth > 0:
                hidden = self._level(num_reqs, levels, level, max_keys)
            draw_children(
                logits=self._compute_logits(hidden),
                temperature=batch.temperature[:num_reqs],
                seeds=batch.seeds[:num_reqs],
                modes=batch.modes[:num_reqs],
                positions=batch.roots[:num_reqs],
                depth=level.depth,
                nodes=level.nodes,
                counts=level.counts,
                columns=level.columns,
                tokens=self.tokens[:num_reqs],
                draft_logits=self._drafted.logits,
                draft_stats=self._drafted.stats,
                state_rows=first_rows,
                inner_rows=level.rows,
                workspace=self._workspace,
            )

    def _level(self, num_reqs: int, levels: DraftLevels, level: Level, max_keys: int) -> Tensor:
        """Hidden states ``[R * m, H]`` at one level's nodes."""
        roots = self._batch.roots[:num_reqs]
        # A node past the model's length is always trimmed by the scheduler; it only
        # must not write outside the request's blocks.
        self._inputs.read_level(
            requests=self._batch.slots[:num_reqs],
            roots=roots,
            tokens=self.tokens[:num_reqs],
            nodes=level.nodes,
            first=level.first,
            depth=level.depth,
            max_len=self._max_model_len,
            longest=self._draft_max_len,
        )
        return self._forward_inputs(
            DraftQueries(
                context_lens=roots,
                first=level.first,
                width=level.width,
                ancestors=levels.ancestors,
                max_keys=min(max_keys + level.first + level.width, self._max_model_len),
                max_slots=self._max_model_len,
            ),
        )

    def _forward_inputs(self, queries: DraftQueries) -> Tensor:
        """Hidden states ``[R * width, H]`` of the rows that `_inputs` holds."""
        num_reqs, cache, inputs = len(queries.context_lens), self._cache, self._inputs
        rows = num_reqs * queries.width
        slots = inputs.slots[:, :rows]
        tables = cache.block_tables.input_block_tables
        by_group = {
            group: self._backend.draft_metadata(
                queries,
                self._multiples(queries.width)[: num_reqs + 1],
                tables[group][:num_reqs],
                slots[group],
            )
            for group in set(cache.groups.values())
        }
        return self._forward(
            inputs.token_ids[:rows],
            inputs.positions[:rows],
            {name: by_group[group] for name, group in cache.groups.items()},
            cache.by_layer(slots),
            None,
        )

    def _multiples(self, step: int) -> Tensor:
        """int32 ``[max_num_reqs + 1]``: 0, step, 2 * step, ...; made once per step.

        A graph's first run, before it is captured, makes it.
        """
        if step not in self._all_multiples:
            self._all_multiples[step] = self._places * step
        return self._all_multiples[step]


def chain_width(levels: DraftLevels) -> int:
    """Tokens per request that the captured pass reads: a path of such a tree, and the root."""
    return levels.tree.depth + 1
