"""The proposer: grows every request's token tree with the draft model."""

from __future__ import annotations

from typing import Any

import torch
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
    """Index arrays of one tree, level by level, on the device.

    Attributes:
        parents: For each depth, int64 ``[m]``: its nodes that have children.
        children: For each depth, int64 ``[c]``: their children...
        parent_index: ...the position of each child's parent in ``parents``...
        ranks: ...and each child's draft order among its siblings.
        branch: For each depth, the most children of any of these nodes.
        ancestors: bool ``[size, size]``.
        depths: int64 ``[size]``.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        def tensor(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.tree = tree
        self.ancestors = torch.from_numpy(tree.ancestor_mask.copy()).to(device)
        self.depths = tensor(tree.depths.tolist())
        self.parents, self.children, self.parent_index, self.ranks = [], [], [], []
        self.branch = []
        for level in tree.levels[:-1]:
            parents = [node for node in level.tolist() if tree.children[node]]
            children = [child for node in parents for child in tree.children[node]]
            index = [i for i, node in enumerate(parents) for _ in tree.children[node]]
            self.parents.append(tensor(parents))
            self.children.append(tensor(children))
            self.parent_index.append(tensor(index))
            self.ranks.append(tensor(tree.child_ranks[children].tolist()))
            self.branch.append(max(len(tree.children[node]) for node in parents))


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
        requests, counts = committed.requests, committed.counts
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
        starts[1:] = committed.last + 1
        seq_lens = committed.positions[committed.last] + 1
        block_table = self._block_table(requests)
        request_of_token = torch.repeat_interleave(counts)
        slots = self._slots(block_table, request_of_token, committed.positions)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(torch.int32),
            num_reqs=len(counts),
            num_actual_tokens=len(committed.tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table,
            slot_mapping=slots,
            causal=True,
            positions=committed.positions,
        )
        _, metadata = self.build_per_group_and_layer_attn_metadata(common)
        return self._forward(
            committed.tokens, committed.positions, slots, metadata, len(counts), committed.last
        )

    def grow(
        self,
        tree: TokenTree,
        root_logits: Tensor,
        root_tokens: Tensor,
        root_positions: Tensor,
        requests: Tensor,
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
        batch = len(requests)
        block_table = self._block_table(requests)
        tokens = torch.zeros(batch, tree.size, dtype=torch.int64, device=self.device)
        tokens[:, 0] = root_tokens
        sampling.start(tree, root_logits.shape[-1])
        logits = root_logits
        for depth, nodes in enumerate(levels.parents):
            if depth > 0:
                logits = self._level_forward(
                    levels, nodes, tokens[:, nodes], root_positions, block_table
                )
            drawn = sampling.children(logits, depth, nodes, levels.branch[depth])
            tokens[:, levels.children[depth]] = drawn[
                :, levels.parent_index[depth], levels.ranks[depth]
            ]
        return sampling.finish(tokens)

    def _level_forward(
        self,
        levels: TreeLevels,
        nodes: Tensor,
        tokens: Tensor,
        root_positions: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """Draft logits ``[B * m, V]`` at one level's internal nodes, all requests at once."""
        batch, width = tokens.shape
        # A node past the model's length is always trimmed by the scheduler; it
        # only must not write outside the request's blocks or the RoPE table.
        positions = root_positions[:, None] + levels.depths[nodes]
        positions = positions.clamp(max=self.draft_max_len - 1).flatten()
        request_of_token = torch.arange(batch, device=self.device).repeat_interleave(width)
        slot_positions = (root_positions[:, None] + nodes).flatten()
        slots = self._slots(block_table, request_of_token, slot_positions)
        rows = torch.arange(batch * width, device=self.device).view(batch, width)
        num_nodes = (self.max_model_len - root_positions).clamp(max=levels.tree.size)
        num_keys = int((root_positions + num_nodes).max())
        group = self.draft_attn_groups[0]
        queries = TreeQueries(
            rows=rows,
            block_table=block_table,
            context_lens=root_positions,
            num_nodes=num_nodes,
            ancestors=levels.ancestors[nodes],
            max_keys=num_keys,
            only_trees=True,
        )
        metadata = CPUTreeAttentionMetadata(
            num_actual_tokens=batch * width,
            max_query_len=width,
            query_start_loc=rows[:, 0],
            max_seq_len=num_keys,
            seq_lens=root_positions,
            block_table=block_table,
            slot_mapping=slots,
            scheduler_metadata=None,
            tree=queries,
        )
        per_layer = dict.fromkeys(group.layer_names, metadata)
        return self._forward(tokens.flatten(), positions, slots, per_layer, batch)

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
            hidden = self.model(
                input_ids=tokens.to(torch.int32), positions=positions, inputs_embeds=None
            )
            return self.model.compute_logits(hidden if rows is None else hidden[rows])

    def _block_table(self, requests: Tensor) -> Tensor:
        """int32 ``[B, max_blocks]``: cache blocks of these requests, for the draft's layers."""
        table = self.runner.input_batch.block_table[self.kv_cache_gid]
        return table.get_device_tensor(self.runner.input_batch.num_reqs)[requests]

    def _slots(self, block_table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Cache slots of these positions, int64; past the model's length the padding slot."""
        inside = positions < self.max_model_len
        block = (positions // self.block_size).clamp(max=block_table.shape[1] - 1)
        slots = block_table[rows, block].long() * self.block_size + positions % self.block_size
        return torch.where(inside, slots, PADDING_SLOT)
