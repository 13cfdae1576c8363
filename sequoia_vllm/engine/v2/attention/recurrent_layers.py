"""Recurrent layers with trees: vLLM's own, except for the rows of tree nodes.

Steps without drafts are vLLM's, and so are rows of prompts and of requests without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec

from sequoia_vllm.engine.common.settings import without_speculation
from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2
from sequoia_vllm.kernels.recurrent_tree import (
    NEVER,
    KeptNodes,
    RecurrentHeads,
    RecurrentStates,
    ScoredNodes,
    commit_nodes,
    convolve_nodes,
)
from sequoia_vllm.step.commit import layers_by_cache


@dataclass
class RecurrentTreeMetadata:
    """What a layer needs in a step with trees, whose rows come first."""

    state_indices: Tensor  # int32 ``[R]``: block of each tree's state; 0: a CUDA graph's padding
    block_table: Tensor  # int32 ``[R, columns]``: all state blocks of a request
    block_size: int  # tokens after which vLLM keeps a state for others; `NEVER`: it keeps none
    num_rows: int  # of tree nodes
    others: Any = None  # vLLM's metadata of the requests without trees alone; None: there are none
    tree: ScoredNodes | None = None  # the nodes; the runner sets it


class RecurrentTreeBuilder:
    """Builds vLLM's metadata without speculation, and ours for trees; derive from it first."""

    vllm_config: VllmConfig
    kv_cache_spec: Any
    device: torch.device

    def __init__(
        self, spec: Any, layers: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        plain = without_speculation(vllm_config)
        super().__init__(spec, layers, plain, device)  # type: ignore[call-arg]
        self.supports_update_block_table = False  # it would take our metadata for vLLM's
        if (checkpoints := getattr(self, "checkpoint_builder", None)) is not None:
            checkpoints.vllm_config = vllm_config  # as the scheduler places them
        requests = self.vllm_config.scheduler_config.max_num_seqs
        # Stays in place: CUDA graphs read it.
        self._state_indices = torch.zeros(requests, dtype=torch.int32, device=self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        """Calls vLLM's for all requests without drafts; those with drafts precede them."""
        batch, drafts = common_attn_metadata, num_decode_draft_tokens_cpu
        trees = 0 if drafts is None else int((drafts > 0).sum())
        if trees == 0:
            return super().build(common_prefix_len, batch)  # type: ignore[misc]
        mode = self.vllm_config.cache_config.mamba_cache_mode
        blocks = mamba_get_block_table_tensor(
            batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode
        )
        self._state_indices[:trees].copy_(blocks[:trees, 0])
        self._state_indices[trees:].fill_(0)
        rows, end = batch.query_start_loc_cpu[[trees, -1]].tolist()
        others = None
        if rows < end:
            others = super().build(0, _without(batch, trees, rows))  # type: ignore[misc]
        return RecurrentTreeMetadata(
            state_indices=self._state_indices[: batch.num_reqs],
            block_table=batch.block_table_tensor,
            block_size=self.kv_cache_spec.block_size if mode == "align" else NEVER,
            num_rows=rows,
            others=others,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Builds for graphs of one kind of step: all requests have trees, or none has drafts."""
        drafts = common_attn_metadata.query_start_loc_cpu.diff() - 1
        return self.build(0, common_attn_metadata, num_decode_draft_tokens_cpu=drafts)


def _without(batch: CommonAttentionMetadata, requests: int, rows: int) -> CommonAttentionMetadata:
    """The batch without its first requests and rows. Views would begin in the middle of memory."""
    starts = batch.query_start_loc_cpu[requests:] - rows
    assert batch.seq_lens_cpu_upper_bound is not None
    assert batch.is_prefilling is not None
    return batch.replace(
        query_start_loc=batch.query_start_loc[requests:] - rows,
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens[requests:].clone(),
        num_reqs=batch.num_reqs - requests,
        num_actual_tokens=batch.num_actual_tokens - rows,
        max_query_len=int(starts.diff().max()),
        block_table_tensor=batch.block_table_tensor[requests:].clone(),
        slot_mapping=batch.slot_mapping[rows:],
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[requests:],
        is_prefilling=batch.is_prefilling[requests:],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


@cache
def _backend(of_vllm: Any, builder: Any) -> type[AttentionBackend]:
    """One class for all layers of a kind, as vLLM groups layers by it."""
    methods = {"get_builder_cls": staticmethod(lambda: builder)}
    return type(f"{builder.__name__}Backend", (of_vllm,), methods)


class RecurrentTreeLayer:
    """A layer of vLLM's with states as if nothing were drafted: one per request.

    Layers derive from it and one of vLLM's, this first.

    """

    builder: Any  # builds this kind of layer's metadata; of both classes
    prefix: str
    kv_cache: tuple[Tensor, ...]
    conv1d: Any
    get_state_dtype: Callable[[], tuple[torch.dtype, ...]]  # vLLM's, inputs' first
    parameters: Callable[[], Iterator[Tensor]]  # torch's
    kept: KeptNodes  # what nodes leave for the commit; set once layers are loaded
    place: int  # which of its layers this is

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = self.num_speculative_tokens = 0  # vLLM's classes have one of these names

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Returns vLLM's, without states for drafts."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        return replace(spec, num_speculative_blocks=0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Returns vLLM's, with our builder."""
        backend: Any = super().get_attn_backend()  # type: ignore[misc]
        return _backend(backend, self.builder)

    @property
    def shape(self) -> RecurrentHeads | None:
        """Sizes of this rank's heads; None: it has none.

        Raises:
            ValueError: Our kernels have no heads of these sizes.
        """
        return None

    @property
    def convolution(self) -> Any:
        """The layer's convolution, which has weights and a bias."""
        return self.conv1d

    @property
    def channels(self) -> int:
        """Inputs of a token that the layer convolves."""
        return len(self.convolution.weight)

    @property
    def unsupported(self) -> str | None:
        """The reason why our kernels cannot serve this layer; None: they can."""
        try:
            _ = self.shape
        except ValueError as error:
            return f"layer {self.prefix} has {error}"
        return None

    @property
    def last_inputs(self) -> Tensor:
        """``[blocks, W - 1, C]``: each request's last inputs."""
        inputs = self.kv_cache[0]
        return inputs.transpose(1, 2) if is_conv_state_dim_first() else inputs

    @property
    def states(self) -> tuple[Tensor, ...]:
        """``[blocks, Hv, V, K]``, contiguous in a block; of convolutions none."""
        return self.kv_cache[1:]

    def trees_of_step(self) -> RecurrentTreeMetadata | None:
        """The trees of the step that runs; None: vLLM's own layer computes it."""
        steps = get_forward_context().attn_metadata
        found = steps.get(self.prefix) if isinstance(steps, dict) else None
        return found if isinstance(found, RecurrentTreeMetadata) else None

    def convolve(self, inputs: Tensor, trees: RecurrentTreeMetadata, silu: bool) -> Tensor:
        """Convolves nodes' inputs along their paths, and keeps them: ``[rows, C]``."""
        convolution = self.convolution
        return convolve_nodes(
            inputs, convolution.weight.squeeze(1), convolution.bias,
            history=self.last_inputs, silu=silu, **self.kept_of(trees),
        )  # fmt: skip

    def kept_of(self, trees: RecurrentTreeMetadata) -> dict[str, Any]:
        """What each kernel needs of the nodes and of the layer's place."""
        assert trees.tree is not None
        return {"nodes": trees.tree, "kept": self.kept, "layer": self.place}

    def compute_others(
        self, trees: RecurrentTreeMetadata, forward: Callable[..., Any], *by_row: Tensor
    ) -> None:
        """Calls vLLM's forward for the rows behind the trees'; these are cut from each tensor."""
        if trees.others is None:
            return
        with self.as_metadata(trees.others):
            forward(*(each[trees.num_rows :] for each in by_row))

    def as_metadata(self, metadata: Any) -> AbstractContextManager[None]:
        """Within it vLLM's layer finds this metadata of the step."""
        context = replace(get_forward_context(), attn_metadata={self.prefix: metadata})
        return override_forward_context(context)


class KdaLayer(RecurrentTreeLayer):
    """What layers of Kimi Delta Attention have in common."""

    local_num_heads: int
    head_dim: int

    @property
    def shape(self) -> RecurrentHeads:
        """See `RecurrentTreeLayer.shape`."""
        heads, size = self.local_num_heads, self.head_dim
        return RecurrentHeads(heads, heads, size, size, by_channel=True)


@contextmanager
def replaced_layers(*classes: type) -> Iterator[None]:
    """Within it, models are built with our layers; a plain engine beside never sees them.

    Each class names the one of vLLM that it stands for: the last that it derives from.
    """
    ours = {each.__bases__[-1].__name__: each for each in classes}
    assert not ours.keys() & op_registry_oot.keys()
    op_registry_oot.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del op_registry_oot[name]


class NodeStates:
    """The target's recurrent layers.

    Args:
        layers: By name, all of one shape; at least one.
        rows: The most nodes of a step, roots included.
    """

    def __init__(self, layers: dict[str, RecurrentTreeLayer], rows: int) -> None:
        self._layers = layers
        [shape] = {layer.shape for layer in layers.values()}
        [first, *_] = layers.values()
        sizes, [dtype, *_] = (first.channels, len(layers), rows), first.get_state_dtype()
        device = next(first.parameters()).device
        self.kept = KeptNodes.empty(shape, *sizes, dtype, device)
        for place, layer in enumerate(layers.values()):
            layer.kept, layer.place = self.kept, place
        self._groups: list[tuple[str, RecurrentStates]] = []

    def commit(self, metadata: dict[str, Any], trees: ScoringTreesV2, accepted: Tensor) -> None:
        """Replays the accepted paths on all layers' states: at most two launches per cache group.

        Args:
            metadata: Each layer's metadata of this step.
            accepted: int32 ``[R, D]``: accepted nodes by depth, then -1.
        """
        if not self._groups:
            self._groups = self._by_group(metadata)
        for name, states in self._groups:
            found = metadata[name]
            commit_nodes(
                states,
                self.kept,
                nodes=found.tree,
                accepted=accepted,
                context_lens=trees.context_lens,
                block_table=found.block_table,
                block_size=found.block_size,
            )

    def _by_group(self, metadata: dict[str, Any]) -> list[tuple[str, RecurrentStates]]:
        """The first layer of each cache group, and the states of all its layers."""
        inputs = {name: layer.last_inputs for name, layer in self._layers.items()}
        found = []
        for names in layers_by_cache(inputs, metadata):
            layers = [self._layers[name] for name in names]
            states = RecurrentStates.of(
                [layer.last_inputs for layer in layers],
                [state for layer in layers for state in layer.states],
                [layer.place for layer in layers],
            )
            found.append((names[0], states))
        return found


def scored_nodes(trees: ScoringTreesV2, metadata: RecurrentTreeMetadata) -> ScoredNodes:
    """The trees, as kernels read them; views of buffers that stay in place for CUDA graphs."""
    return ScoredNodes(
        cu_nodes=trees.query_start_loc,
        slots=trees.request_slots,
        parents=trees.parents,
        ancestors=trees.ancestors,
        depth=trees.depth,
        state_indices=metadata.state_indices[: trees.num_requests],
    )
