"""Tree attention and commit on GPUs, in Triton, beside vLLM's own attention backends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.attention import chunked_local_attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sequoia_vllm.drafting.chain_pieces import chain_pieces
from sequoia_vllm.drafting.growth import NodeQueries, chain_ancestors
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.compat.contract import check_model
from sequoia_vllm.engine.runner.attention_layers import (
    reason_of,
    replaced_backends,
    unmaskable_features,
    window_of,
)
from sequoia_vllm.engine.v2.attention import mla_layers, sparse_layers
from sequoia_vllm.engine.v2.attention.attention_gpu import (
    DraftMetadata,
    GPUTreeForward,
    GPUTreeQueries,
    other_chains,
)
from sequoia_vllm.engine.v2.attention.chunked_layers import (
    ChunkedTreeForward,
    chunked_backend,
    limits_of,
    rows_in_chunks,
)
from sequoia_vllm.engine.v2.attention.layers_with_states import layers_of
from sequoia_vllm.engine.v2.attention.recurrent_layers import (
    NodeStates,
    RecurrentTreeLayer,
    RecurrentTreeMetadata,
    replaced_layers,
    scored_nodes,
)
from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2, TreeBackend
from sequoia_vllm.kernels.commit import CacheLayers, commit_accepted
from sequoia_vllm.kernels.node_masks import NodeMasks
from sequoia_vllm.kernels.sparse_choice import AncestorScores, parts_of_keys
from sequoia_vllm.kernels.tree_attention import TreeAttentionWorkspace
from sequoia_vllm.step.commit import layers_by_cache

logger = logging.getLogger("vllm.sequoia")
_PACKAGE = __name__.rpartition(".")[0]


class NoTreesBackend:
    """Registered for what trees cannot use: vLLM then takes the next one that it prefers."""

    @staticmethod
    def validate_configuration(**_selected: Any) -> list[str]:
        """Reasons why vLLM must not use it for any layer."""
        return [
            "trees cannot use it: leave --attention-backend out, or name FLASH_ATTN (for latent "
            "attention TRITON_MLA, if it is sparse FLASHMLA_SPARSE)"
        ]


def _is_other_sparse(backend: AttentionBackendEnum) -> bool:
    return "MLA_SPARSE" in backend.name and backend != AttentionBackendEnum.FLASHMLA_SPARSE


CLASSES = {
    AttentionBackendEnum.FLASH_ATTN: f"{_PACKAGE}.attention_gpu.FlashTreeBackend",
    AttentionBackendEnum.TRITON_ATTN: f"{_PACKAGE}.attention_gpu.TritonTreeBackend",
    AttentionBackendEnum.FLASH_ATTN_DIFFKV: f"{_PACKAGE}.diffkv_layers.FlashDiffKVTreeBackend",
    AttentionBackendEnum.TRITON_ATTN_DIFFKV: f"{_PACKAGE}.diffkv_layers.TritonDiffKVTreeBackend",
    AttentionBackendEnum.TRITON_MLA: f"{_PACKAGE}.mla_layers.MLATreeBackend",
    AttentionBackendEnum.FLASHMLA_SPARSE: f"{_PACKAGE}.sparse_layers.SparseTreeBackend",
    **dict.fromkeys(
        (
            # Preferred on Blackwell; the next two where images attend in both directions.
            AttentionBackendEnum.FLASHINFER, AttentionBackendEnum.TRITON_FLASHINFER,
            AttentionBackendEnum.TRITON_FLASH_ATTN,
            AttentionBackendEnum.CUTLASS_MLA, AttentionBackendEnum.FLASH_ATTN_MLA,
            AttentionBackendEnum.FLASHINFER_MLA, AttentionBackendEnum.FLASHMLA,
            AttentionBackendEnum.TOKENSPEED_MLA,
            *(one for one in AttentionBackendEnum if _is_other_sparse(one)),
        ),
        f"{__name__}.{NoTreesBackend.__qualname__}",
    ),
}  # fmt: skip
"""Paths of our classes."""


def classes_for(architectures: Sequence[str]) -> dict[AttentionBackendEnum, str]:
    """`CLASSES`, or others where models of these architectures need them."""
    if not any(name.startswith("HYV4") for name in architectures):
        return CLASSES
    check_model("hy_v4")
    sinks = f"{_PACKAGE}.sparse_sink_layers.SinkTreeBackend"
    return CLASSES | {AttentionBackendEnum.FLASHMLA_SPARSE: sinks}


_LARGEST_HEAD = 512  # Gemma 4's layers without a window, and latents


class GPUTreeBackend(TreeBackend):
    """Tree attention in Triton; its ``masks`` are repacked where a slot's tree has changed."""

    def __init__(self, ancestors: Tensor) -> None:
        self._ancestors = ancestors
        self.masks = NodeMasks()
        self._has_own_trees = ancestors.ndim == 3
        if not self._has_own_trees:
            self.masks.of(ancestors)  # here, not in a step: making one waits for the device
        self._workspace = TreeAttentionWorkspace(_LARGEST_HEAD, ancestors.device)
        self._layers: list[tuple[str, CacheLayers]] = []
        self._states: NodeStates | None = None
        self._chain: Tensor | None = None  # the longest one's ancestors, where layers take chains
        self._indexers: set[str] = set()  # layers with the keys of sparse attention's indexers
        self._sparse: AncestorScores | None = None

    @contextmanager
    def replace_attention(self, architectures: Sequence[str]) -> Iterator[None]:
        """Replaces what our classes extend, and backends that trees cannot use."""
        with (
            replaced_backends(classes_for(architectures)),
            replaced_layers(*layers_of(architectures)),
            # Until: vLLM's metadata of chunks has the requests' own tables and lengths.
            patched(
                chunked_local_attention, "create_chunked_local_attention_backend", chunked_backend
            ),
        ):
            yield

    def unsupported_attention(self, layer_name: str, impl: Any) -> str | None:
        """Reason why our kernel cannot serve this layer; None: it can."""
        if isinstance(impl, RecurrentTreeLayer):
            return impl.unsupported
        if isinstance(impl, sparse_layers.SparseTreeImpl):
            return reason_of(layer_name, impl.unsupported_features)
        if sparse_layers.is_indexer(impl):
            sparse_layers.prepare_indexer(impl)
            self._indexers.add(layer_name)
            return None
        if isinstance(impl, mla_layers.MLATreeImpl):
            if self._chain is None:
                logger.info("Sequoia: latent attention is decoded in Triton, as trees need it")
            self._take_chains()
            return reason_of(layer_name, impl.unsupported_features)
        window, longest, is_short = None, self._ancestors.shape[-1], False
        if isinstance(impl, GPUTreeForward):
            window = window_of(impl)
            is_short = self._has_own_trees and window is not None and window <= longest
            if not self._has_own_trees:
                self.masks.of(self._ancestors, window)  # here, not in a step: see __init__
        if isinstance(impl, ChunkedTreeForward):
            self._take_chains()
        head_size = getattr(impl, "head_size", 0)
        features = {
            **unmaskable_features(impl),
            f"heads of {head_size}": head_size > _LARGEST_HEAD,
            **limits_of(impl, longest),
            f'a window of {window} tokens and "dynamic_tree": true, which needs more than '
            f"{longest}": is_short,
            f"{type(impl).__name__} (use --attention-backend FLASH_ATTN or TRITON_ATTN)": (
                not isinstance(impl, GPUTreeForward)
            ),
        }
        return reason_of(layer_name, features)

    def _take_chains(self) -> None:
        """From now on layers take chains, too, in steps without trees as well."""
        if self._chain is None:
            self._chain = chain_ancestors(self._ancestors.shape[-1], self._ancestors.device)
            self.attends_without_trees = True
            self.masks.of(self._chain)  # here, not in a step: see __init__

    def keep_nodes(self, layers: dict[str, Any], rows: int) -> int:
        """See `TreeBackend.keep_nodes`."""
        found = {name: one for name, one in layers.items() if isinstance(one, RecurrentTreeLayer)}
        self._states = NodeStates(found, rows) if found else None
        if self._indexers:
            self._sparse = AncestorScores(rows, self._ancestors)
        return self._states.kept.size_in_bytes if self._states else 0

    def scoring_queries(self, trees: ScoringTreesV2 | None, metadata: Any) -> Any:
        """The trees' rows, as views of buffers that stay in place for CUDA graphs."""
        if self._sparse is not None:
            return trees and sparse_layers.scores_of_step(self._sparse, trees, metadata)
        if isinstance(metadata, MLACommonMetadata):  # layers with latents take chains, too
            assert self._chain is not None
            parts = mla_layers.decoded_nodes(trees, metadata, self._chain)
            return tuple(self.queries(nodes, table) for nodes, table in parts)
        if hasattr(metadata, "cut"):  # of layers with chunks
            assert self._chain is not None
            return rows_in_chunks(trees, metadata, self._chain, self.queries)
        if trees is None:
            return None
        if isinstance(metadata, RecurrentTreeMetadata):
            return scored_nodes(trees, metadata)
        return self.queries(
            trees,
            metadata.block_table[: trees.num_requests],
            others=other_chains(trees, metadata),
            flash_max_context=trees.max_keys if trees.by_flash else None,
        )

    def draft_metadata(
        self, queries: NodeQueries, block_table: Tensor, slots: Tensor
    ) -> DraftMetadata:
        """Metadata whose rows are all tree nodes, or committed tokens in chains of any length."""
        if queries.mask is None and queries.width > queries.ancestors.shape[-1]:
            queries, owners = chain_pieces(queries, len(slots))
            block_table = block_table[owners]
        return DraftMetadata(tree=self.queries(queries, block_table), slot_mapping=slots)

    def queries(self, nodes: NodeQueries, block_table: Tensor, **more: Any) -> GPUTreeQueries:
        """What attention takes: these nodes, with the kernel's masks and memory."""
        known = {field.name: getattr(nodes, field.name) for field in fields(NodeQueries)}
        return GPUTreeQueries(
            **known, block_table=block_table, masks=self.masks, workspace=self._workspace, **more
        )

    def commit(
        self, caches: dict[str, Tensor], metadata: dict[str, Any], trees: ScoringTreesV2,
        accepted: Tensor,
    ) -> None:  # fmt: skip
        """Moves keys and values in one launch per group of layers with equal blocks and shape."""
        if not self._layers:
            keys = {name: each for name, each in caches.items() if isinstance(each, Tensor)}
            latents = {name: each[:, None] for name, each in keys.items() if each.ndim == 3}
            keys |= latents
            for names in layers_by_cache(keys, metadata):
                together = [[keys[name] for name in names]]
                if names[0] in self._indexers:
                    parts = (parts_of_keys(caches[name]) for name in names)
                    together = [list(each) for each in zip(*parts, strict=True)]
                self._layers += [(names[0], CacheLayers.of(each)) for each in together]
        if self._states is not None:
            self._states.commit(metadata, trees, accepted)
        for layer, group in self._layers:
            commit_accepted(
                group,
                block_table=metadata[layer].block_table[: trees.num_requests],
                context_lens=trees.context_lens,
                accepted=accepted,
            )
