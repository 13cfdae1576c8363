"""Models of Llama's shape with random weights, whose attention is our tree kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.check.model_kernels import (
    add_and_normalize,
    rotate_and_store,
    silu_and_multiply,
)
from benchmarks.gpu.check.paged import PagedCache
from sequoia_vllm.kernels.tree_attention import (
    NodeMask,
    TreeAttentionWorkspace,
    tree_attention,
)

# Standard deviation of logits: some tokens are likely, as in a trained model.
_LOGIT_DEVIATION = 2.0


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a model; as `sequoia_vllm.hardware.models.ModelShape`, which needs pydantic."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    @property
    def parameters(self) -> int:
        """All parameters but the norms'."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.hidden * self.vocab

    def cache_bytes(self, requests: int, positions: int, dtype: torch.dtype) -> int:
        """Memory of a cache of all layers."""
        layer = PagedCache.bytes_per_layer(
            requests, positions, self.kv_heads, self.head_size, dtype
        )
        return self.layers * layer


@dataclass(frozen=True)
class Nodes:
    """Which nodes of every request a forward pass reads.

    Attributes:
        context_lens: int32 ``[R]``: tokens in the cache before node 0.
        query_start_loc: int32 ``[R + 1]``.
        first: The first node that is read.
        width: How many.
        mask: Of the tree.
    """

    context_lens: Tensor
    query_start_loc: Tensor
    first: int
    width: int
    mask: NodeMask


class ScoredNodes:
    """All nodes of every request's tree, as a target reads them, and where they are.

    Attributes:
        nodes: The nodes.
        positions, slots: int64 ``[R * N]``: of each, by depth and by stored index;
            `place` writes them.

    Args:
        context_lens: int32 ``[R]``: tokens in the cache before node 0.
        depths: int64 ``[N]``: of each node.
        ancestors: bool ``[N, N]``: which nodes each sees.
    """

    def __init__(self, context_lens: Tensor, depths: Tensor, ancestors: Tensor) -> None:
        requests, size, device = len(context_lens), len(depths), context_lens.device
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * size
        self.nodes = Nodes(context_lens, starts, 0, size, NodeMask.of(ancestors))
        self._depths = depths.to(device)
        self._offsets = torch.arange(size, device=device)
        self.positions = torch.zeros(requests * size, dtype=torch.int64, device=device)
        self.slots = torch.zeros_like(self.positions)

    @classmethod
    def chain(cls, context_lens: Tensor, width: int) -> ScoredNodes:
        """The next ``width`` tokens."""
        causal = torch.ones(width, width, dtype=torch.bool, device=context_lens.device)
        return cls(context_lens, torch.arange(width), causal.tril())

    def place(self, cache: PagedCache) -> ScoredNodes:
        """Takes the contexts as they are now; returns itself."""
        contexts = self.nodes.context_lens[:, None]
        self.positions.copy_((contexts + self._depths).view(-1))
        self.slots.copy_(cache.slots(contexts + self._offsets).view(-1))
        return self


@dataclass(frozen=True)
class _Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor


class Llama:
    """A decoder with random weights.

    Args:
        shape: Its sizes.
        dtype: Of weights and activations.
        max_positions: Longest request.
        generator: Of the weights; its device is the model's.
    """

    def __init__(
        self, shape: LlamaShape, dtype: torch.dtype, max_positions: int, generator: torch.Generator
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device = generator.device

        def random(*size: int, deviation: float) -> Tensor:
            drawn = torch.empty(size, dtype=dtype, device=device)
            return drawn.normal_(0, deviation, generator=generator)

        def matrix(rows: int, columns: int) -> Tensor:
            return random(rows, columns, deviation=columns**-0.5)

        hidden, size = shape.hidden, shape.head_size
        ones = torch.ones(hidden, dtype=dtype, device=device)
        self._layers = [
            _Layer(
                qkv=matrix((shape.heads + 2 * shape.kv_heads) * size, hidden),
                out=matrix(hidden, shape.heads * size),
                gate_up=matrix(2 * shape.intermediate, hidden),
                down=matrix(hidden, shape.intermediate),
                attention_norm=ones,
                mlp_norm=ones,
            )
            for _ in range(shape.layers)
        ]
        self._embedding = random(shape.vocab, hidden, deviation=1.0)
        self._head = random(shape.vocab, hidden, deviation=_LOGIT_DEVIATION * hidden**-0.5)
        self._norm = ones
        self._rotation = _rotation(max_positions, size).to(device)
        self._workspace = TreeAttentionWorkspace(size, device)

    def perturb(self, noise: float, generator: torch.Generator) -> None:
        """Adds random numbers to every matrix, ``noise`` times as large as its own."""
        matrices = [self._embedding, self._head]
        for layer in self._layers:
            matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
        for weights in matrices:
            drawn = torch.empty_like(weights).normal_(generator=generator)
            weights += noise * float(weights.std()) * drawn

    def new_cache(self, requests: int, positions: int, generator: torch.Generator) -> PagedCache:
        """A cache for it, full of random numbers."""
        shape = self.shape
        return PagedCache(
            shape.layers,
            requests,
            positions,
            shape.kv_heads,
            shape.head_size,
            self.dtype,
            generator,
        )

    def score(self, tokens: Tensor, scored: ScoredNodes, cache: PagedCache) -> Tensor:
        """Hidden states ``[R * N, H]`` of whole trees, whose tokens are ``[R * N]``."""
        return self.forward(tokens, scored.positions, scored.slots, scored.nodes, cache)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, nodes: Nodes, cache: PagedCache
    ) -> Tensor:
        """Hidden states ``[R * width, H]`` of these nodes.

        Args:
            tokens: ``[R * width]``.
            positions, slots: int64 ``[R * width]``: below 0: keys and values go nowhere.
            nodes: What they see.
            cache: Where keys and values go.
        """
        shape = self.shape
        residual = functional.embedding(tokens, self._embedding)
        hidden = None
        for number, layer in enumerate(self._layers):
            normed = add_and_normalize(hidden, residual, layer.attention_norm)
            packed = functional.linear(normed, layer.qkv).view(len(tokens), -1, shape.head_size)
            rotate_and_store(
                packed, self._rotation, positions, slots, cache.layers[number], heads=shape.heads
            )
            attended = self._attend(packed[:, : shape.heads], nodes, cache, number)
            hidden = functional.linear(attended, layer.out)
            normed = add_and_normalize(hidden, residual, layer.mlp_norm)
            gated = silu_and_multiply(functional.linear(normed, layer.gate_up))
            hidden = functional.linear(gated, layer.down)
        return add_and_normalize(hidden, residual, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, V]``, the model's dtype."""
        return functional.linear(hidden, self._head)

    def _attend(self, query: Tensor, nodes: Nodes, cache: PagedCache, layer: int) -> Tensor:
        keys, values = cache.keys_and_values(layer)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tree_attention(
            query, keys, values, cache.block_table, nodes.context_lens, nodes.query_start_loc,
            nodes.mask, first_node=nodes.first, scale=self.shape.head_size**-0.5,
            key_scale=1.0, value_scale=1.0, workspace=self._workspace, output=output,
            max_queries=nodes.width,
        )  # fmt: skip
        return output.view(len(query), -1)


def _rotation(positions: int, head_size: int) -> Tensor:
    """float32 ``[positions, head_size]``: cosines, then sines."""
    frequencies = 10000.0 ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()
