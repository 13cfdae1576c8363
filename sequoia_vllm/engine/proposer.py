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
from sequoia_vllm.engine.draft_progress import CommittedTokens
from sequoia_vllm.engine.draft_sampling import DraftSampling
from sequoia_vllm.engine.drafts import GrownTrees
from sequoia_vllm.tree import TokenTree

PADDING_SLOT = -1  # vLLM's cache-update op skips it


class TreeLevels:
    """Index arrays of one tree, level by level.

    Attributes:
        parents: For each depth, int64 ``[m]`` (host): its nodes that have children.
        ancestors: For each depth, bool ``[m, size]``: what these nodes see.
        children: For each depth, int64 ``[c]``: their children...
        parent_index: ...the position of each child's parent in ``parents``...
        ranks: ...and each child's draft order among its siblings.
        branch: For each depth, the most children of any of these nodes.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        def tensor(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.parents, self.children, self.parent_index, self.ranks = [], [], [], []
        self.branch, self.ancestors = [], []
        for level in tree.levels[:-1]:
            parents = [node for node in level.tolist() if tree.children[node]]
            children = [child for node in parents for child in tree.children[node]]
            index = [i for i, node in enumerate(parents) for _ in tree.children[node]]
            self.parents.append(np.array(parents))
            self.ancestors.append(torch.from_numpy(tree.ancestor_mask[parents]).to(device))
            self.children.append(tensor(children))
            self.parent_index.append(tensor(index))
            self.ranks.append(tensor(tree.child_ranks[children].tolist()))
            self.branch.append(max(len(tree.children[node]) for node in parents))


@dataclass(frozen=True)
class TreeSlots:
    """Where one drafting pass's trees lie, for all levels at once.

    Attributes:
        positions, slots: int64 ``[B, size]`` (host): RoPE position and cache
            slot of each node.
        block_table: int32 ``[B, max_blocks]``.
        root_positions, num_nodes: int64 ``[B]``: context before the root, and
            nodes that have slots.
        max_keys: Slots of the longest request.
    """

    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    block_table: Tensor
    root_positions: Tensor
    num_nodes: Tensor
    max_keys: int


class SequoiaProposer(DraftModelProposer):
    """vLLM's draft-model proposer (loading, KV cache, compilation) growing trees.

    Its `propose` is replaced by `advance` (the draft reads what was committed)
    and `grow` (one forward per level over that level's internal nodes).
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config=vllm_config, device=device, runner=runner)
        self.runner = runner
        self.draft_max_len = self.draft_model_config.max_model_len
        self._levels: dict[int, TreeLevels] = {}

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
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(last) + 1
        seq_lens = committed.positions[last] + 1
        slots = self._slots(np.repeat(requests, counts), committed.positions)
        positions = torch.from_numpy(committed.positions).to(self.device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(self.device),
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
        tokens = torch.from_numpy(committed.tokens.astype(np.int32)).to(self.device)
        rows = None
        if len(tokens) > len(counts):
            rows = torch.from_numpy(last).to(self.device)
        return self._forward(tokens, positions, slots, metadata, len(counts), rows)

    def grow(
        self,
        tree: TokenTree,
        root_logits: Tensor,
        root_tokens: NDArray[np.int64],
        root_positions: NDArray[np.int64],
        requests: NDArray[np.int64],
        sampling: DraftSampling,
    ) -> GrownTrees:
        """Grows one tree per request, level by level.

        Args:
            tree: Topology to grow.
            root_logits: ``[B, V]``: draft logits at each root.
            root_tokens, root_positions: int64 ``[B]``.
            requests: int64 ``[B]``: rows of the batch.
            sampling: How each request draws children.
        """
        levels = self.levels_of(tree)
        slots = self._tree_slots(tree, requests, root_positions)
        tokens = torch.zeros(len(requests), tree.size, dtype=torch.int64, device=self.device)
        tokens[:, 0] = torch.from_numpy(root_tokens)
        sampling.start(tree, root_logits.shape[-1])
        logits = root_logits
        for depth, nodes in enumerate(levels.parents):
            if depth > 0:
                logits = self._level_forward(tokens, slots, nodes, levels.ancestors[depth])
            drawn = sampling.children(logits, depth, nodes, levels.branch[depth])
            tokens[:, levels.children[depth]] = drawn[
                :, levels.parent_index[depth], levels.ranks[depth]
            ]
        return sampling.finish(tokens)

    def _tree_slots(
        self, tree: TokenTree, requests: NDArray[np.int64], root_positions: NDArray[np.int64]
    ) -> TreeSlots:
        # A node past the model's length is always trimmed by the scheduler; it
        # only must not write outside the request's blocks or the RoPE table.
        positions = np.minimum(root_positions[:, None] + tree.depths, self.draft_max_len - 1)
        nodes = root_positions[:, None] + np.arange(tree.size)
        num_nodes = np.minimum(self.max_model_len - root_positions, tree.size)
        return TreeSlots(
            positions=positions,
            slots=self._slots(requests[:, None], nodes).numpy(),
            block_table=self._block_table(requests),
            root_positions=torch.from_numpy(root_positions).to(self.device),
            num_nodes=torch.from_numpy(num_nodes).to(self.device),
            max_keys=int((root_positions + num_nodes).max()),
        )

    def _level_forward(
        self, tokens: Tensor, trees: TreeSlots, nodes: NDArray[np.int64], ancestors: Tensor
    ) -> Tensor:
        """Draft logits ``[B * m, V]`` at one level's internal nodes, all requests at once."""
        batch, width = len(tokens), len(nodes)
        rows = torch.arange(batch * width, device=self.device).view(batch, width)
        slots = torch.from_numpy(trees.slots[:, nodes]).to(self.device).flatten()
        metadata = CPUTreeAttentionMetadata(
            num_actual_tokens=batch * width,
            max_query_len=width,
            query_start_loc=rows[:, 0],
            max_seq_len=trees.max_keys,
            seq_lens=trees.root_positions,
            block_table=trees.block_table,
            slot_mapping=slots,
            scheduler_metadata=None,
            tree=TreeQueries(
                rows=rows,
                block_table=trees.block_table,
                context_lens=trees.root_positions,
                num_nodes=trees.num_nodes,
                ancestors=ancestors,
                max_keys=trees.max_keys,
                only_trees=True,
            ),
        )
        return self._forward(
            tokens[:, nodes].flatten().to(torch.int32),
            torch.from_numpy(trees.positions[:, nodes]).to(self.device).flatten(),
            slots,
            dict.fromkeys(self.draft_attn_groups[0].layer_names, metadata),
            batch,
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
        return table[torch.from_numpy(requests).to(self.device)]

    def _slots(self, requests: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Cache slots of these positions, int64; past the model's length the padding slot."""
        table = self._table.get_numpy_array()
        block = np.minimum(positions // self.block_size, table.shape[1] - 1)
        slots = table[requests, block] * np.int64(self.block_size) + positions % self.block_size
        inside = positions < self.max_model_len
        return torch.from_numpy(np.where(inside, slots, PADDING_SLOT)).to(self.device)

    @property
    def _table(self) -> Any:
        return self.runner.input_batch.block_table[self.kv_cache_gid]
