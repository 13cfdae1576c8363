"""What differs between devices: attention metadata, and moving keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sequoia_vllm.config import ContextAttention
from sequoia_vllm.engine.v2.scoring import ScoringTrees


@dataclass(frozen=True)
class DraftQueries:
    """One forward pass of the draft over the same nodes of R requests' trees.

    Attributes:
        context_lens: int32 ``[R]``: tokens in the cache before node 0.
        first: The first query is this node; node j is in slot ``context + j``.
        width: Queries per request.
        ancestors: bool ``[I, I]``: which nodes each of the tree's I nodes sees.
        max_keys: No request has more keys than this.
        max_slots: Nor slots: nodes further out have none, and nobody sees them.
    """

    context_lens: Tensor
    first: int
    width: int
    ancestors: Tensor
    max_keys: int
    max_slots: int


class TreeBackend(ABC):
    """Tree attention and commit on one kind of device.

    Args:
        ancestors: bool ``[N, N]``, on the device: the engine's tree.
        context_attention: How the target attends to contexts, see `SequoiaConfig`.
    """

    @abstractmethod
    def __init__(self, ancestors: Tensor, context_attention: ContextAttention) -> None: ...

    @abstractmethod
    def replace_attention(self) -> AbstractContextManager[None]:
        """Within it, layers that are built take our attention backend."""

    @abstractmethod
    def unsupported_attention(self, layer_name: str, impl: Any) -> str | None:
        """Why tree attention cannot serve this layer, or None."""

    @abstractmethod
    def scoring_queries(self, trees: ScoringTrees, metadata: Any) -> Any:
        """What the target's attention needs of these trees, as its metadata's ``tree``."""

    @abstractmethod
    def draft_metadata(
        self, queries: DraftQueries, query_start_loc: Tensor, block_table: Tensor, slots: Tensor
    ) -> Any:
        """Attention metadata of one draft pass.

        Args:
            queries: The pass.
            query_start_loc: int32 ``[R + 1]``.
            block_table: int32 ``[R, max_blocks]``.
            slots: int64 ``[R * width]``: where the queries' keys go.
        """

    @abstractmethod
    def commit(
        self, caches: dict[str, Tensor], metadata: dict[str, Any], trees: ScoringTrees,
        accepted: Tensor,
    ) -> None:  # fmt: skip
        """Moves the accepted path's keys and values to the slots after the root.

        Args:
            caches: The target's caches, by layer.
            metadata: Each layer's attention metadata of this step.
            trees: This step's trees.
            accepted: int32 ``[R, D]``: accepted nodes by depth, then -1.
        """
