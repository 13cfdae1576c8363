"""Prepares the target's pass on Model Runner V2: nodes' positions, keys, and each device's part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.growth import NodeQueries
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels.scoring_inputs import place_nodes


@dataclass(frozen=True)
class OtherRows:
    """Rows of prompts and of requests that decode without drafts; they follow all trees' rows."""

    first: int  # the first such row
    max_rows: int  # the most such rows of any request
    max_keys: int  # upper bound of the tokens of any such request
    metadata: Any = None  # vLLM's, as if the batch had only their requests


@dataclass(frozen=True, kw_only=True)
class ScoringTreesV2(NodeQueries):
    """The trees of a batch, for attention and commit; vLLM sorts their requests first."""

    parents: Tensor  # int32 ``[N]``, or ``[S, N]`` by slot: each node's; the root's is -1
    depth: int  # of the tree's deepest node
    others: OtherRows | None = None  # the rows that are not tree nodes; None: there are none
    by_flash: bool = False  # whether FlashAttention reads contexts, where a layer can leave it to

    @property
    def num_requests(self) -> int:
        """Requests with trees, R."""
        return len(self.context_lens)


class TreeScoring:
    """Turns vLLM's layout of drafts as chains into trees.

    Before the target's forward the runner calls `place`, which writes the positions and the
    contexts that the forward reads; then `trees_of`, or `trees` for CUDA graphs. vLLM's
    slots stay: node i has slot c + i and RoPE position c + depth(i), where c is the context's
    length.
    """

    def __init__(self, tables: TreeTables, max_num_reqs: int, device: torch.device) -> None:
        self._tables = tables
        self.context_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.slots = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)

    def place(self, batch: InputBatch, axes: Tensor | None = None) -> None:
        """Gives nodes the position of their depth, and notes contexts' lengths and slots, in place.

        With ``axes``, M-RoPE's positions ``[axes, tokens]``, it places nodes there and notes
        nothing.
        """
        if batch.num_draft_tokens > 0:
            noted = (self.context_lens, self.slots) if axes is None else None
            positions = batch.positions if axes is None else axes
            place_nodes(batch, self._tables.shifts, positions, noted)

    def trees_of(self, batch: InputBatch) -> ScoringTreesV2 | None:
        """The trees of a batch after `place`; None: it has none."""
        drafts = batch.num_draft_tokens_per_req
        if batch.num_draft_tokens == 0 or drafts is None:
            return None
        num_requests = int((drafts > 0).sum())
        lengths = batch.seq_lens_cpu_upper_bound.numpy()
        others = None
        if num_requests < batch.num_reqs:
            others = OtherRows(
                first=int(batch.query_start_loc_np[num_requests]),
                max_rows=int(batch.num_scheduled_tokens[num_requests:].max()),
                max_keys=int(lengths[num_requests:].max()),
            )
        max_keys = int(lengths[:num_requests].max())
        return self.trees(batch, num_requests, int(drafts.max()) + 1, max_keys, others)

    def trees(
        self,
        batch: InputBatch,
        requests: int,
        nodes: int,
        max_keys: int,
        others: OtherRows | None = None,
    ) -> ScoringTreesV2:
        """The trees of the first requests, of ``nodes`` nodes at most; also those of a graph."""
        return ScoringTreesV2(
            request_slots=self.slots[:requests],
            context_lens=self.context_lens[:requests],
            query_start_loc=batch.query_start_loc[: requests + 1],
            first=0,
            width=nodes,
            ancestors=self._tables.ancestors,
            mask=self._tables.mask,
            parents=self._tables.parents,
            depth=self._tables.tree.depth,
            max_keys=max_keys,
            others=others,
        )


class TreeBackend(ABC):
    """Tree attention and commit on one kind of device.

    Args:
        ancestors: bool ``[N, N]``, on the device: the engine's tree; or ``[S, N, N]``, by slot.
    """

    @abstractmethod
    def __init__(self, ancestors: Tensor) -> None: ...

    @abstractmethod
    def replace_attention(self, architectures: Sequence[str]) -> AbstractContextManager[None]:
        """Makes layers built within the block use our attention backend.

        Args:
            architectures: vLLM's names of the target's model.
        """

    @abstractmethod
    def unsupported_attention(self, layer_name: str, impl: Any) -> str | None:
        """Reason why tree attention cannot serve this layer; None: it can."""

    def keep_nodes(self, layers: dict[str, Any], rows: int) -> int:
        """Allocates what recurrent ``layers`` of the target keep of nodes until the commit.

        Args:
            rows: The most nodes of a step, roots included.

        Returns:
            Bytes; 0: there are no such layers.
        """
        return 0

    attends_without_trees = False
    """Whether our attention has rows in steps without trees, too; so with latents on GPUs."""

    @abstractmethod
    def scoring_queries(self, trees: ScoringTreesV2 | None, metadata: Any) -> Any:
        """Makes the ``tree`` attribute of the target's attention metadata."""

    def attach(
        self, trees: ScoringTreesV2 | None, metadata: dict[str, Any], layers: list[str]
    ) -> None:
        """Hands ``trees`` to the attention of these layers, where it has rows in this step."""
        if trees is None and not self.attends_without_trees:
            return
        for shared in shared_metadata(metadata, layers):
            shared.tree = self.scoring_queries(trees, shared)

    @abstractmethod
    def draft_metadata(self, queries: NodeQueries, block_table: Tensor, slots: Tensor) -> Any:
        """Attention metadata of one draft pass.

        Args:
            block_table: int32 ``[R, max_blocks]``: the cache blocks of each request.
            slots: int64 ``[rows]``: slots of the queries' keys.
        """

    @abstractmethod
    def commit(
        self, caches: dict[str, Tensor], metadata: dict[str, Any], trees: ScoringTreesV2,
        accepted: Tensor,
    ) -> None:  # fmt: skip
        """Moves the accepted path's keys and values to the slots after the root.

        Args:
            caches: The target's caches, by layer; of recurrent layers their states.
            metadata: Each layer's attention metadata of this step.
            accepted: int32 ``[R, D]``: accepted nodes by depth, then -1.
        """


def shared_metadata(metadata: dict[str, Any], layers: list[str]) -> list[Any]:
    """The metadata objects of these layers, each once: one for each of their cache groups."""
    return list({id(metadata[name]): metadata[name] for name in layers}.values())
