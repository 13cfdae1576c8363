"""The proposer: grows every request's token tree with the draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from sequoia_vllm.engine.cpu_attention import CPUTreeAttentionMetadata, TreeQueries
from sequoia_vllm.engine.v1.draft_sampling import DraftSampling
from sequoia_vllm.engine.v1.drafts import DraftedTrees
from sequoia_vllm.engine.v1.reading import CommittedTokens
from sequoia_vllm.tree import TokenTree

PADDING_SLOT = -1  # vLLM's cache-update op skips it


class TreeLevels:
    """Index arrays of one tree, level by level. A level is in *draft order*: the
    children of its first node, of its second, and so on.

    Attributes:
        parents: For each depth, int64 ``[m]`` (host): its nodes that have children.
        ancestors: For each depth, bool ``[m, size]``: what these nodes see.
        branch: For each depth, the most children of any of these nodes.
        drawn: For each depth, int64 ``[c]``: which of the ``m * branch`` tokens
            drawn are children; None: all.
        expanded: For each depth, int64: which of those c have children themselves;
            None: all.
        inner: int64 ``[I]`` (host): all of ``parents`` but the root.
        stored: int64 ``[size]``: place of each node among root and levels in
            draft order.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        def tensor(values: list[int], total: int) -> Tensor | None:
            return None if values == list(range(total)) else torch.tensor(values, device=device)

        self.parents, self.ancestors, self.branch = [], [], []
        self.drawn, self.expanded = [], []
        order, parents = [0], [0]
        while parents:
            branch = max(len(tree.children[node]) for node in parents)
            ranked = [(node, rank) for node in parents for rank in range(branch)]
            drawn = [i for i, (node, rank) in enumerate(ranked) if rank < len(tree.children[node])]
            children = [child for node in parents for child in tree.children[node]]
            expanded = [i for i, child in enumerate(children) if tree.children[child]]
            self.parents.append(np.array(parents))
            self.ancestors.append(torch.from_numpy(tree.ancestor_mask[parents]).to(device))
            self.branch.append(branch)
            self.drawn.append(tensor(drawn, len(ranked)))
            self.expanded.append(tensor(expanded, len(children)))
            order += children
            parents = [children[i] for i in expanded]
        self.inner = np.concatenate([np.array([], dtype=np.int64), *self.parents[1:]])
        self.stored = torch.from_numpy(np.argsort(order)).to(device)


@dataclass(frozen=True)
class InnerNodes:
    """Where the nodes lie that the draft reads, for all levels of a pass at once.

    Attributes:
        positions, slots: int64 ``[B, I]``: RoPE position and cache slot of each.
        block_table: int32 ``[B, max_blocks]``.
        root_positions, num_nodes: int64 ``[B]``: context before the root, and
            nodes that have slots.
        max_keys: Slots of the longest request.
    """

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    root_positions: Tensor
    num_nodes: Tensor
    max_keys: int


class TreeProposer(DraftModelProposer):
    """vLLM's draft-model proposer (loading, KV cache, compilation) growing trees.

    Its `propose` is replaced by `advance` (the draft reads what was committed)
    and `grow` (one forward per level over that level's internal nodes).
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config=vllm_config, device=device, runner=runner)
        self.runner = runner
        self.draft_max_len = self.draft_model_config.max_model_len
        self._levels: dict[int, TreeLevels] = {}
        self._rows = torch.arange(runner.max_num_tokens)

    def levels_of(self, tree: TokenTree) -> TreeLevels:
        """Index arrays of this tree; trees are prefixes of one, so size tells them apart."""
        if tree.size not in self._levels:
            self._levels[tree.size] = TreeLevels(tree, self.device)
        return self._levels[tree.size]

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, Tensor] | None = None,
    ) -> None:
        """One dummy forward; vLLM's runs one per speculative token, a tree needs fewer."""
        super().dummy_run(num_tokens, use_cudagraphs, True, slot_mappings)

    def advance(self, committed: CommittedTokens) -> Tensor:
        """Runs the draft over newly committed tokens, writing its KV cache.

        Returns:
            Draft logits ``[R, V]`` after each request's last committed token.
        """
        requests, counts, last = committed.requests, committed.counts, committed.last
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        starts[1:] = last + 1
        seq_lens = committed.positions[last] + 1
        slots = self._slots(np.repeat(requests, counts), committed.positions)
        positions = torch.from_numpy(committed.positions)
        query_start_loc = torch.from_numpy(starts)
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            num_reqs=len(counts),
            num_actual_tokens=len(committed.tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self._block_table(requests),
            slot_mapping=slots,
            causal=True,
            positions=positions,
        )
        _, metadata = self.build_per_group_and_layer_attn_metadata(common)
        tokens = torch.from_numpy(committed.tokens.astype(np.int32))
        rows = torch.from_numpy(last) if len(tokens) > len(counts) else None
        return self._forward(tokens, positions, slots, metadata, len(counts), rows)

    def grow(
        self,
        tree: TokenTree,
        root_logits: Tensor,
        root_tokens: NDArray[np.int64],
        root_positions: NDArray[np.int64],
        requests: NDArray[np.int64],
        sampling: DraftSampling,
    ) -> DraftedTrees:
        """Grows one tree per request, level by level.

        Args:
            tree: Topology to grow.
            root_logits: ``[B, V]``: draft logits at each root.
            root_tokens, root_positions: int64 ``[B]``.
            requests: int64 ``[B]``: rows of the batch.
            sampling: How each request draws children.
        """
        levels = self.levels_of(tree)
        inner = self._inner_nodes(tree, levels, requests, root_positions)
        batch, first = len(requests), 0
        sampling.start(tree, root_logits.shape[-1])
        logits, in_draft_order = root_logits, [torch.from_numpy(root_tokens)[:, None]]
        for depth, nodes in enumerate(levels.parents):
            if depth > 0:
                parents = _selected(in_draft_order[-1], levels.expanded[depth - 1])
                columns = slice(first, first + len(nodes))
                logits = self._level_forward(parents, inner, columns, levels.ancestors[depth])
                first += len(nodes)
            drawn = sampling.children(logits, depth, nodes, levels.branch[depth])
            in_draft_order.append(_selected(drawn.view(batch, -1), levels.drawn[depth]))
        return sampling.finish(torch.cat(in_draft_order, dim=1).index_select(1, levels.stored))

    def _inner_nodes(
        self,
        tree: TokenTree,
        levels: TreeLevels,
        requests: NDArray[np.int64],
        root_positions: NDArray[np.int64],
    ) -> InnerNodes:
        # A node past the model's length is always trimmed by the scheduler; it
        # only must not write outside the request's blocks or the RoPE table.
        positions = root_positions[:, None] + tree.depths[levels.inner]
        num_nodes = np.minimum(self.max_model_len - root_positions, tree.size)
        return InnerNodes(
            positions=torch.from_numpy(np.minimum(positions, self.draft_max_len - 1)),
            slots=self._slots(requests[:, None], root_positions[:, None] + levels.inner),
            block_table=self._block_table(requests),
            root_positions=torch.from_numpy(root_positions),
            num_nodes=torch.from_numpy(num_nodes),
            max_keys=int((root_positions + num_nodes).max()),
        )

    def _level_forward(
        self, tokens: Tensor, inner: InnerNodes, columns: slice, ancestors: Tensor
    ) -> Tensor:
        """Draft logits ``[B * m, V]`` at one level's inner nodes, all requests at once.

        Args:
            tokens: int64 ``[B, m]``.
            inner: Where they lie...
            columns: ...in these columns.
            ancestors: bool ``[m, size]``.
        """
        rows = self._rows[: tokens.numel()].view(tokens.shape)
        # Contiguous: vLLM's kernels read them without looking at strides.
        positions, slots = (
            values[:, columns].flatten().contiguous() for values in (inner.positions, inner.slots)
        )
        metadata = CPUTreeAttentionMetadata(
            num_actual_tokens=tokens.numel(),
            max_query_len=tokens.shape[1],
            query_start_loc=rows[:, 0],
            max_seq_len=inner.max_keys,
            seq_lens=inner.root_positions,
            block_table=inner.block_table,
            slot_mapping=slots,
            scheduler_metadata=None,
            tree=TreeQueries(
                rows=rows,
                block_table=inner.block_table,
                context_lens=inner.root_positions,
                num_nodes=inner.num_nodes,
                ancestors=ancestors,
                max_keys=inner.max_keys,
                only_trees=True,
            ),
        )
        return self._forward(
            tokens.flatten().to(torch.int32),
            positions,
            slots,
            dict.fromkeys(self.draft_attn_groups[0].layer_names, metadata),
            len(tokens),
        )

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        metadata: dict[str, Any],
        num_reqs: int,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Draft logits of these rows (all if None) after one forward over all tokens."""
        with (
            self.runner.stats.timed("draft", num_reqs, len(tokens)),
            set_forward_context(
                metadata,
                self.vllm_config,
                num_tokens=len(tokens),
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=dict.fromkeys(self._draft_attn_layer_names, slots),
            ),
        ):
            hidden = self.model(input_ids=tokens, positions=positions, inputs_embeds=None)
            return self.model.compute_logits(hidden if rows is None else hidden[rows])

    def _block_table(self, requests: NDArray[np.int64]) -> Tensor:
        """int32 ``[B, max_blocks]``: cache blocks of these requests, for the draft's layers."""
        num_reqs = self.runner.input_batch.num_reqs
        table = self._table.get_device_tensor(num_reqs)
        if len(requests) == num_reqs:  # in order: all of them
            return table
        return table[torch.from_numpy(requests)]

    def _slots(self, requests: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Cache slots of these positions, int64; past the model's length the padding slot."""
        table = self._table.get_numpy_array()
        block = np.minimum(positions // self.block_size, table.shape[1] - 1)
        slots = table[requests, block] * np.int64(self.block_size) + positions % self.block_size
        inside = positions < self.max_model_len
        return torch.from_numpy(np.where(inside, slots, PADDING_SLOT))

    @property
    def _table(self) -> Any:
        return self.runner.input_batch.block_table[self.kv_cache_gid]


def _selected(tokens: Tensor, columns: Tensor | None) -> Tensor:
    return tokens if columns is None else tokens.index_select(1, columns)
