"""The interface of what differs between devices: attention metadata and the commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from sequoia_vllm.drafting.growth import NodeQueries
from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2


class TreeBackend(ABC):
    """Tree attention and commit on one kind of device.

    Args:
        ancestors: bool ``[N, N]``, on the device: the engine's tree; or those of `TreeShapes`.
    """

    @abstractmethod
    def __init__(self, ancestors: Tensor) -> None: ...

    @abstractmethod
    def replace_attention(self) -> AbstractContextManager[None]:
        """Makes layers built within the block use our attention backend."""

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
