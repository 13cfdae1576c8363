"""Sparse latent attention (DeepSeek V3.2's) with trees: each node is a row of vLLM's own kernels.

A row takes a list of tokens that an indexer chose. Only this choice knows of trees.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.indexer_topk import get_indexer_topk
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerBackend,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from sequoia_vllm.engine.common.patched import patch_for_good
from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2
from sequoia_vllm.kernels.node_masks import seen_nodes
from sequoia_vllm.kernels.sparse_choice import AncestorScores


class SparseTreeImpl(FlashMLASparseImpl):
    """vLLM's sparse latent attention by FlashMLA, as it is."""

    @property
    def unsupported_features(self) -> dict[str, bool]:
        """Features that trees cannot have, and whether this layer has them."""
        on_host = isinstance(self.index_group, HiSparseMLAIndexGroup)
        return {
            "latents on the host (drop hisparse_config of --attention-config)": on_host,
            "latents in fp8, which trees were not tried with (add --kv-cache-dtype bfloat16)": (
                is_quantized_kv_cache(self.kv_cache_dtype)
            ),
        }


class SparseTreeBuilder(FlashMLASparseMetadataBuilder):
    """Builds vLLM's metadata, in which trees of any sizes are decoded.

    vLLM decodes requests of equally many rows. Others read a prompt: a short one attends to keys
    and values of each head, whatever its indexer chose.
    """

    require_uniform_decodes = False


class SparseTreeBackend(FlashMLASparseBackend):
    """Registered for FLASHMLA_SPARSE in the workers of a Sequoia engine only."""

    get_impl_cls = staticmethod(lambda: SparseTreeImpl)
    get_builder_cls = staticmethod(lambda: SparseTreeBuilder)


class IndexerTreeBuilder(DeepseekV32IndexerMetadataBuilder):
    """Builds vLLM's metadata, in which each row has its own length.

    vLLM does so for most numbers of drafts. For some its kernel takes requests of equally many
    rows, and others read a prompt.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_flattening = not self.supports_varlen


class IndexerTreeBackend(DeepseekV32IndexerBackend):
    """What the caches of indexers use, from `prepare_indexer`."""

    get_builder_cls = staticmethod(lambda: IndexerTreeBuilder)


def is_indexer(layer: Any) -> bool:
    """Whether this is the cache of an indexer's keys, as the models that are served have it."""
    backend = getattr(layer, "get_attn_backend", lambda: None)()
    return backend in (DeepseekV32IndexerBackend, IndexerTreeBackend)


def prepare_indexer(layer: Any) -> None:
    """Lets an indexer of a loaded target choose among ancestors, before vLLM makes its builder."""
    layer.get_attn_backend = lambda: IndexerTreeBackend
    # Its rows are all tokens up to a slot. Until: vLLM's metadata says which slots a row sees.
    patch_for_good(sparse_attn_indexer, "get_indexer_topk", topk_among_ancestors)


def topk_among_ancestors(backend: str) -> Any:
    """Returns vLLM's operator that chooses tokens; in steps with trees nodes choose by path."""
    plain = get_indexer_topk(backend)
    metadata = get_forward_context().attn_metadata
    trees = (getattr(one, "tree", None) for one in metadata.values())
    held = next((tree for tree in trees if isinstance(tree, AncestorScores)), None)
    if held is None:
        return plain

    def choose(
        logits: Tensor, seq_lens: Tensor, next_n: int, topk_indices: Tensor, *sizes: int
    ) -> None:
        lengths = held.bring_together(logits, seq_lens.flatten())
        plain(logits, lengths[:, None], 1, topk_indices, *sizes)
        held.to_slots(topk_indices)

    return choose


def scores_of_step(held: AncestorScores, trees: ScoringTreesV2, metadata: Any) -> AncestorScores:
    """The ``tree`` of sparse layers' metadata: ``held``, noted once for all of them."""
    if isinstance(metadata, DeepseekV32IndexerMetadata):
        held.place(trees.query_start_loc, trees.context_lens, seen_nodes(trees))
    return held
