"""Attention layers with trees, on every device: the class that runs, and the models that cannot."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec


class KeysAreWritten(Exception):  # noqa: N818 (no error)
    """Raised in a pass that is for keys and values alone; nothing behind the layer is computed."""


class _KeysOnly:
    num_decode_tokens = 0  # vLLM's latent layers (MLA) ask for it before they write

    @property
    def num_actual_tokens(self) -> int:
        """Ends the pass: vLLM's latent layers ask for it first of all once latents are written."""
        raise KeysAreWritten


KEYS_ONLY = _KeysOnly()
"""A layer's attention metadata that ends the pass there: `KeysAreWritten`."""


class TreeForward(ABC):
    """Tree attention for one of vLLM's implementations; subclasses derive from both, this first."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Runs attention like vLLM's implementation, but masks each tree node to its ancestors.

        vLLM's kernels take no mask and treat every request as a chain. The rows of tree nodes get
        attention over context and ancestors, in one softmax. This step's keys are in the cache by
        now.

        Raises:
            KeysAreWritten: The metadata is `KEYS_ONLY`.
        """
        tree = getattr(attn_metadata, "tree", None)
        if tree is None:
            if attn_metadata is KEYS_ONLY:
                raise KeysAreWritten
            return super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        if not tree.only_trees:
            queries, others, rows = self._chains(tree, query, attn_metadata, output)
            super().forward(  # type: ignore[misc]
                layer, queries, key, value, kv_cache, others, rows,
                output_scale, output_block_scale,
            )  # fmt: skip
        self._forward_trees(layer, query, kv_cache, tree, output)
        return output

    def _chains(
        self, tree: Any, query: Tensor, attn_metadata: Any, output: Tensor
    ) -> tuple[Tensor, Any, Tensor]:
        """Queries, metadata and output of the rows for vLLM's kernels; here all rows."""
        return query, attn_metadata, output

    @abstractmethod
    def _forward_trees(
        self, layer: Any, query: Tensor, kv_cache: Tensor, tree: Any, output: Tensor
    ) -> None:
        """Writes the rows of tree nodes."""


class LatentTreeBuilder(MLACommonMetadataBuilder):
    """Builds vLLM's metadata of latent attention (MLA), in which trees are decoded.

    Requests of more rows than a tree has nodes read a prompt, whose rows attend to keys and values
    of each head. All others are decoded: their queries are brought into the latents' space.
    """

    query_len_support = QueryLenSupport.SINGLE_ONLY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # vLLM's Triton backend reserves memory for as many rows per request as it may decode. The
        # rows of trees need none of it, and would take gigabytes.
        super().__init__(*args, **kwargs)
        self.query_len_support = QueryLenSupport.VARLEN
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any) -> Any:
        """Calls vLLM's, and adds the block table of all requests."""
        metadata = super().build(common_prefix_len, common_attn_metadata, *args)
        metadata.block_table = common_attn_metadata.block_table_tensor
        return metadata


@contextmanager
def replaced_backends(classes: Mapping[AttentionBackendEnum, str]) -> Iterator[None]:
    """Within it, layers that are built take our classes, by their paths, and keep them."""
    selector._cached_get_attn_backend.cache_clear()
    for name, path in classes.items():
        register_backend(name, path)
    try:
        yield
    finally:
        for name in classes:
            name.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def unmaskable_features(impl: Any) -> dict[str, bool]:
    """Features that trees cannot serve on any device, and whether this implementation uses them."""
    return {
        "chunked local attention": getattr(impl, "chunk_lookback", -1) not in (-1, None),
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "attention other than decoder self-attention": getattr(impl, "attn_type", "decoder")
        != "decoder",
    }


def window_of(impl: Any) -> int | None:
    """Tokens that a query sees, itself included; None: all before. GPUs keep (back, ahead)."""
    window = impl.sliding_window
    if isinstance(window, tuple):
        return None if window[0] < 0 else window[0] + 1
    return None if window in (None, -1) else window


def freed_behind(spec: KVCacheSpec) -> int | None:
    """The window behind which vLLM gives a cache group's blocks to others; None: it keeps them."""
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


def reason_of(layer_name: str, features: Mapping[str, bool]) -> str | None:
    """Names the features that the layer uses, or None if it uses none."""
    used = [name for name, present in features.items() if present]
    return f"layer {layer_name} uses {', '.join(used)}" if used else None


def supported_layers(
    vllm_config: VllmConfig, unsupported: Callable[[str, Any], str | None]
) -> list[str]:
    """Names of a loaded engine's attention layers, the draft's included.

    Args:
        unsupported: Why trees cannot have a layer of this name and implementation; None: they can.

    Raises:
        ValueError: They cannot have one of the layers; the message names it and the reason.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    for name, layer in layers.items():
        reason = unsupported(name, getattr(layer, "impl", layer))
        scale = getattr(layer, "_k_scale", None)
        if scale is not None and scale.numel() > 1:
            reason = f"layer {name} uses a scale for each head of its KV cache"
        if reason:
            _refuse(reason)
    return list(layers)


# Kimi K3's starts a decoder that is refused: see `sequoia_vllm.engine.frontend.refusals`.
_KNOWN_STATES = ("vllm.v1.worker.gpu.model_states.", "vllm.models.kimi_k3.")


def refuse_own_inputs(model_state: Any) -> None:
    """Refuses a model whose class prepares a step's inputs by code of its own.

    Such code reads the tokens of rows before a row (n-grams). In a tree these are no ancestors.

    Args:
        model_state: vLLM's `ModelState` of a loaded model.

    Raises:
        ValueError: Its class is none of vLLM's for all models; the message names it.
    """
    own = type(model_state)
    if not own.__module__.startswith(_KNOWN_STATES):
        _refuse(f"{own.__name__} prepares its inputs, and may read rows before a tree's node")


def _refuse(reason: str) -> NoReturn:
    raise ValueError(
        f"Sequoia cannot run this model: {reason}. Serve it without --speculative-config, or with "
        "one of vLLM's own methods."
    )
