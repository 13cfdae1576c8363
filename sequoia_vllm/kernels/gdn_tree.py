# mypy: allow-untyped-defs
"""Trees over a Gated DeltaNet layer, in Triton: without a recurrent state per node.

Along a path a head's state S, of V rows and K columns, takes a token with key k (of length 1),
value v, decay a = e^g and strength b as S' = a S (I - b k k^T) + b v k^T. With S0 the state before
the tree and G_i the sum of g from the root to node i, this is

    S_i = e^{G_i} S0 + sum over j of e^{G_i - G_j} u_j k_j^T
    u_i = b_i (v_i - e^{G_i} S0 k_i - sum over j before i of e^{G_i - G_j} (k_j . k_i) u_j)

where j runs over node i and its ancestors, or its ancestors alone. So a pass reads S0 once, and
writes k, u and G of each node. The commit reads those of the accepted path and writes one state.
Nothing of a rejected node reaches a state.

A pass is `convolve_nodes`, then `score_nodes`, in each layer. After verification `commit_nodes`
serves all layers of a cache group. Nothing waits for the device or depends on its values: CUDA
graphs may hold a pass. All is in float32 inside, products of matrices by three of TF32 each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.hardware.support import MAX_NODES
from sequoia_vllm.kernels.gdn_tree_kernels import (
    commit_inputs_kernel,
    commit_states_kernel,
    convolve_nodes_kernel,
    score_nodes_kernel,
)
from sequoia_vllm.kernels.tree_shapes import rows_per_slot

NEVER = 2**30
"""Tokens of a block that no path ends: states are given to nobody."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# The least side of a matrix product.
_LEAST = 16
_NODES, _CHANNELS = 16, 128
_PART = _KEY_PART = 32
_COMMITTED_CHANNELS, _COMMITTED_KEYS = 256, 64


@dataclass(frozen=True)
class GdnShape:
    """Sizes of a layer's heads.

    Attributes:
        heads: Heads of queries and keys, H.
        value_heads: Heads of values, Hv, a multiple of H: each key head has equally many.
        key, value: Sizes of a key and of a value: powers of two from 16 on.

    Raises:
        ValueError: If they are others.
    """

    heads: int
    value_heads: int
    key: int
    value: int

    def __post_init__(self) -> None:
        """Checks them."""
        sizes = (self.key, self.value)
        if self.value_heads % self.heads or any(n < _LEAST or n & (n - 1) for n in sizes):
            raise ValueError(
                f"{self.heads} key heads of {self.key} and {self.value_heads} value heads of"
                f" {self.value}: sizes must be powers of two from {_LEAST} on, and each key head"
                " must have equally many value heads"
            )

    @property
    def channels(self) -> int:
        """Inputs of a token: queries, keys and values of all heads, C."""
        return 2 * self.heads * self.key + self.value_heads * self.value


@dataclass(frozen=True)
class KeptNodes:
    """What passes leave of their T rows in L layers, until the commit; from `empty`.

    Attributes:
        shape: Of the layers' heads.
        inputs: ``[L, T, C]``: before the convolution, in the model's dtype.
        keys: float32 ``[L, T, H, K]``: of length 1.
        updates: float32 ``[L, T, Hv, V]``: u.
        decays: float32 ``[L, T, Hv]``: G.
    """

    shape: GdnShape
    inputs: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor

    @staticmethod
    def empty(
        shape: GdnShape, layers: int, rows: int, dtype: torch.dtype, device: torch.device | str
    ) -> KeptNodes:
        """Memory for ``rows`` nodes in each of these layers."""
        heads = {"keys": (shape.heads, shape.key), "decays": (shape.value_heads,)}
        heads["updates"] = (shape.value_heads, shape.value)
        return KeptNodes(
            shape=shape,
            inputs=torch.empty(layers, rows, shape.channels, dtype=dtype, device=device),
            **{
                name: torch.empty(layers, rows, *sizes, dtype=torch.float32, device=device)
                for name, sizes in heads.items()
            },
        )

    @property
    def size_in_bytes(self) -> int:
        """Memory that it takes."""
        return sum(each.nbytes for each in (self.inputs, self.keys, self.updates, self.decays))


@dataclass(frozen=True)
class RecurrentStates:
    """States of L layers in vLLM's cache that are committed together; from `of`.

    Attributes:
        inputs: Each layer's ``[blocks, W - 1, C]``: a request's last inputs, the oldest first.
        states: Each layer's ``[blocks, Hv, V, K]``, contiguous in a block.
        input_addresses, state_addresses: int64 ``[L]``, on the device.
        places: int32 ``[L]``, on the device: which of `KeptNodes`' layers each is.
    """

    inputs: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    input_addresses: Tensor
    state_addresses: Tensor
    places: Tensor

    @staticmethod
    def of(
        inputs: Sequence[Tensor], states: Sequence[Tensor], places: Sequence[int]
    ) -> RecurrentStates:
        """Prepares the caches of one or more layers; waits for the device.

        Raises:
            ValueError: If there are none, or they differ in more than their contents.
        """
        for caches in (inputs, states):
            kinds = {(cache.dtype, cache.shape[1:], cache.stride()) for cache in caches}
            if len(kinds) != 1:
                raise ValueError(f"expected states of alike layers, got {sorted(map(str, kinds))}")
        device = states[0].device
        of_inputs, of_states = (
            torch.tensor([each.data_ptr() for each in caches], device=device)
            for caches in (inputs, states)
        )
        numbers = torch.tensor(places, dtype=torch.int32, device=device)
        return RecurrentStates(tuple(inputs), tuple(states), of_inputs, of_states, numbers)


@dataclass(frozen=True, kw_only=True)
class ScoredNodes:
    """The trees of R requests whose T rows a pass has.

    Attributes:
        cu_nodes: int32 ``[R + 1]``: rows ``cu_nodes[r]`` to ``cu_nodes[r + 1]`` are
            request r's, in stored order.
        slots: int32 or int64 ``[R]``: request slots; padding has -1.
        parents: int32 ``[N]``, or ``[S, N]`` by slot: each node's; the root's is -1.
        ancestors: bool ``[N, N]``, or ``[S, N, N]``: which nodes each sees, itself included.
        depth: Of the deepest node, at least.
        state_indices: int32 ``[R]``: block of each request's state; 0 or less: padding.
    """

    cu_nodes: Tensor
    slots: Tensor
    parents: Tensor
    ancestors: Tensor
    depth: int
    state_indices: Tensor


def convolve_nodes(
    inputs: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    *,
    nodes: ScoredNodes,
    history: Tensor,
    kept: KeptNodes,
    layer: int = 0,
    silu: bool = True,
) -> Tensor:
    """Convolves each node's inputs with those of its last ancestors, and keeps them.

    Where a node has too few ancestors, the request's last inputs before the root follow.

    Args:
        inputs: ``[T, C]``, contiguous in its rows.
        weights: ``[C, W]``, contiguous: the last column is for the node itself.
        bias: ``[C]``, or None.
        nodes: The trees.
        history: ``[blocks, W - 1, C]``, with any strides.
        kept: Its inputs are written.
        layer: Which of its layers this is.
        silu: Whether SiLU follows.

    Returns:
        ``[T, C]``, in the dtype of the inputs.
    """
    channels, width = weights.shape
    convolved = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    parts = triton.cdiv(nodes.parents.shape[-1], _NODES), triton.cdiv(channels, _CHANNELS)
    if (requests := len(nodes.state_indices)) > 0:
        convolve_nodes_kernel[(requests, *parts)](
            inputs, inputs.stride(0), weights, bias, history, history.stride(0), history.stride(2),
            history.stride(1), nodes.state_indices, nodes.cu_nodes, nodes.slots, nodes.parents,
            rows_per_slot(nodes.parents, 1), kept.inputs[layer], convolved, channels,
            WIDTH=width, HAS_BIAS=bias is not None, SILU=silu, NODES=_NODES, CHANNELS=_CHANNELS,
            num_warps=4,
        )  # fmt: skip
    return convolved


def score_nodes(
    convolved: Tensor,
    a: Tensor,
    b: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    *,
    nodes: ScoredNodes,
    states: Tensor,
    kept: KeptNodes,
    layer: int = 0,
    output: Tensor,
) -> None:
    """Computes all nodes' outputs from the states before their trees, which stay as they are.

    Args:
        convolved: ``[T, C]``, contiguous: queries, keys, values.
        a, b: ``[T, Hv]``, contiguous: g is ``-exp(log_a) * softplus(a + dt_bias)``, a node's
            strength ``sigmoid(b)``.
        log_a, dt_bias: ``[Hv]``.
        nodes: The trees, of `MAX_NODES` nodes at most.
        states: ``[blocks, Hv, V, K]``, contiguous in a block.
        kept: Its keys, updates and decays are written.
        layer: Which of its layers this is.
        output: ``[T, Hv, V]``, contiguous; padding's rows are left alone.

    Raises:
        ValueError: If trees have more nodes.
    """
    if (most := nodes.ancestors.shape[-1]) > MAX_NODES:
        raise ValueError(f"trees of {most} nodes over recurrent layers: {MAX_NODES} at most")
    shape = kept.shape
    part = _LEAST if most > 32 else min(_PART, shape.value)
    if (requests := len(nodes.state_indices)) > 0:
        score_nodes_kernel[(requests, shape.value_heads, shape.value // part)](
            convolved, a, b, log_a, dt_bias, states, states.stride(0), nodes.state_indices,
            nodes.cu_nodes, nodes.slots, nodes.ancestors, rows_per_slot(nodes.ancestors, 2), most,
            nodes.depth, shape.key**-0.5, kept.keys[layer], kept.updates[layer],
            kept.decays[layer], output,
            HEADS=shape.heads, VALUE_HEADS=shape.value_heads, KEY=shape.key, VALUE=shape.value,
            KEY_PART=_LEAST if most > 32 else min(_KEY_PART, shape.key),
            NODES=max(_LEAST, triton.next_power_of_2(most)), PART=part,
            num_warps=8 if most > 32 else 4, num_stages=1,
        )  # fmt: skip


def commit_nodes(
    caches: RecurrentStates,
    kept: KeptNodes,
    *,
    nodes: ScoredNodes,
    accepted: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    block_size: int = NEVER,
) -> None:
    """Replays roots and accepted paths on the states of all layers, in place.

    vLLM shares states where they end with a block of tokens. Where such an end lies within a path,
    the state there goes to that block.

    Args:
        caches: States of L layers.
        kept: From this step's passes.
        nodes: This step's trees.
        accepted: int32 ``[R, D]``, contiguous in its rows: the accepted node at depth 1, 2, ...,
            then -1.
        context_lens: int32 ``[R]``: tokens before each root.
        block_table: int32 ``[R, columns]``, contiguous in its rows: a request's states, by the
            block of tokens that they end with.
        block_size: Tokens of a block, more than a path has.
    """
    requests, depth = accepted.shape
    if requests == 0:
        return
    shape, width = kept.shape, caches.inputs[0].shape[1] + 1
    history, states = caches.inputs[0], caches.states[0]
    path = (
        nodes.state_indices, nodes.cu_nodes, accepted, accepted.stride(0), depth,
        block_table, block_table.stride(0), context_lens, block_size,
    )  # fmt: skip
    columns = max(_LEAST, triton.next_power_of_2(depth + 1))
    part, key_part = min(_PART, shape.value), min(_COMMITTED_KEYS, shape.key)
    parts = shape.value // part * (shape.key // key_part)
    layers, rows = len(caches.places), kept.inputs.shape[1]
    commit_inputs_kernel[(requests, layers, triton.cdiv(shape.channels, _COMMITTED_CHANNELS))](
        caches.input_addresses, caches.places, history.stride(0), history.stride(2),
        history.stride(1), kept.inputs, rows, shape.channels, *path,
        TYPE=_TYPES[history.dtype], WIDTH=width, PATH=columns, CHANNELS=_COMMITTED_CHANNELS,
        num_warps=4,
    )  # fmt: skip
    commit_states_kernel[(requests, layers * shape.value_heads, parts)](
        caches.state_addresses, caches.places, states.stride(0), kept.keys, kept.updates,
        kept.decays, rows, *path,
        TYPE=_TYPES[states.dtype], HEADS=shape.heads, VALUE_HEADS=shape.value_heads,
        KEY=shape.key, VALUE=shape.value, KEY_PART=key_part, PATH=columns, PART=part, num_warps=4,
        num_stages=1,
    )  # fmt: skip
