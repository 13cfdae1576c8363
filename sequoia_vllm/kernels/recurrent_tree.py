# mypy: allow-untyped-defs
"""Trees over recurrent layers, in Triton: without a state per node. What all kinds share.

A head's state S has V rows and K columns. Along a path its form is

    S_i = e^{G_i} S0 + sum over j of e^{G_i - G_j} u_j k_j^T

with S0 the state before the tree, G_i the sum of the tokens' log decays from the root to node i,
and j over node i and its ancestors. The kinds of layers differ in u: `recurrent_heads`. Where
decays are vectors, the form is that of `recurrent_channels`. So a pass reads S0 once, and writes k,
u and G of each node. The commit reads those of the accepted path and writes one state. Nothing of a
rejected node reaches a state.

A pass is `convolve_nodes`, then the kind's own scores, in each layer; short convolutions have no
more than the former. After verification `commit_nodes` serves all layers of a cache group. Nothing
waits for the device or depends on its values: CUDA graphs may hold a pass. All is in float32
inside, products of matrices by three of TF32 each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.recurrent_tree_kernels import (
    commit_channels_kernel,
    commit_inputs_kernel,
    commit_states_kernel,
    convolve_nodes_kernel,
)
from sequoia_vllm.kernels.tree_shapes import rows_per_slot
from sequoia_vllm.tree import MOST_RECURRENT_NODES

NEVER = 2**30
"""Tokens of a block that no path ends: states are given to nobody."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# The least side of a matrix product.
_LEAST = 16
_NODES, _CHANNELS = 16, 128
_KEY_PART = 32
REGISTERS = 168
"""Per thread, where trees have up to 32 nodes. Else the compiler spills to have 128."""
_COMMITTED_CHANNELS, _COMMITTED_KEYS = 256, 64


@dataclass(frozen=True)
class RecurrentHeads:
    """Sizes of a layer's heads. Mamba2 calls C and B its queries and keys, and x its values.

    Raises:
        ValueError: The sizes are not those that the attributes name.
    """

    heads: int  # heads of queries and keys, H
    value_heads: int  # heads of values, Hv, a multiple of H: each key head has equally many
    key: int  # size of a key, K: a power of two from 16 on
    value: int  # size of a value, V: a multiple of 16
    by_channel: bool = False
    """Whether a token's decay has a number for each channel of a key: then Hv is H."""

    def __post_init__(self) -> None:
        is_odd = self.key < _LEAST or self.key & (self.key - 1) or self.value % _LEAST
        of_one_key = self.value_heads // self.heads
        if is_odd or self.value_heads % self.heads or (self.by_channel and of_one_key > 1):
            raise ValueError(
                f"{self.heads} key heads of {self.key} and {self.value_heads} value heads of"
                f" {self.value}: keys must be powers of two from {_LEAST} on, values multiples of"
                f" {_LEAST}, and each key head must have equally many value heads"
            )

    @property
    def channels(self) -> int:
        """Inputs of a token: queries, keys and values of all heads, C."""
        return 2 * self.heads * self.key + self.value_heads * self.value

    @property
    def part(self) -> int:
        """Components of a value that one program has."""
        return _LEAST if self.value % (2 * _LEAST) else 2 * _LEAST


@dataclass(frozen=True)
class KeptNodes:
    """What passes leave of their T rows in L layers, until the commit; from `empty`."""

    shape: RecurrentHeads | None
    """The layers' heads; None: they are convolutions, and have inputs alone."""
    inputs: Tensor  # ``[L, T, C]``: before the convolution, in the model's dtype
    keys: Tensor  # float32 ``[L, T, H, K]``: k
    updates: Tensor  # float32 ``[L, T, Hv, V]``: u
    decays: Tensor
    """float32 ``[L, T, Hv]``: G; by channel ``[L, T, H, K]``: a token's own log decays, g."""
    related: Tensor
    """float32 ``[T, H, 2 K + 2 N]`` where decays are by channel: products within a pass, with N of
    `MOST_RECURRENT_NODES`. All layers share it."""

    @staticmethod
    def empty(
        shape: RecurrentHeads | None, channels: int, layers: int, rows: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KeptNodes":  # fmt: skip
        """Memory for ``rows`` nodes in each of these layers."""
        sizes: list[tuple[int, ...]] = [(0,)] * 3
        products: tuple[int, ...] = (0,)
        if shape is not None:
            values, keys = shape.value_heads, (shape.heads, shape.key)
            sizes = [keys, (values, shape.value), keys if shape.by_channel else (values,)]
            if shape.by_channel:
                products = (rows, shape.heads, 2 * (shape.key + MOST_RECURRENT_NODES))
        inputs = torch.empty(layers, rows, channels, dtype=dtype, device=device)
        others = [
            torch.empty(layers, rows, *size, dtype=torch.float32, device=device) for size in sizes
        ]
        others.append(torch.empty(products, dtype=torch.float32, device=device))
        return KeptNodes(shape, inputs, *others)

    @property
    def size_in_bytes(self) -> int:
        """Memory that it takes."""
        kept = self.inputs, self.keys, self.updates, self.decays, self.related
        return sum(each.nbytes for each in kept)


@dataclass(frozen=True)
class RecurrentStates:
    """States of L layers in vLLM's cache that are committed together; from `of`."""

    inputs: tuple[Tensor, ...]
    """Each layer's ``[blocks, W - 1, C]``: a request's last inputs, the oldest first."""
    states: tuple[Tensor, ...]
    """Each layer's ``[blocks, Hv, V, K]``, contiguous in a block; of convolutions none."""
    input_addresses: Tensor  # int64 ``[L]``, on the device
    state_addresses: Tensor  # int64 ``[L]``, on the device
    places: Tensor  # int32 ``[L]``, on the device: which of `KeptNodes`' layers each is

    @staticmethod
    def of(
        inputs: Sequence[Tensor], states: Sequence[Tensor], places: Sequence[int]
    ) -> "RecurrentStates":
        """Prepares the caches of one or more layers; waits for the device.

        Args:
            inputs, states: See the attributes; ``states`` is empty for convolutions.
            places: Which of `KeptNodes`' layers each is.

        Raises:
            ValueError: There are none, or they differ in more than their contents.
        """
        for caches in (inputs, states or inputs):
            kinds = {(cache.dtype, cache.shape[1:], cache.stride()) for cache in caches}
            if len(kinds) != 1:
                raise ValueError(f"expected states of alike layers, got {sorted(map(str, kinds))}")
        numbers = [[each.data_ptr() for each in caches] for caches in (inputs, states)]
        read, kept = (torch.tensor(of, dtype=torch.int64).to(inputs[0].device) for of in numbers)
        of_layers = torch.tensor(places, dtype=torch.int32).to(inputs[0].device)
        return RecurrentStates(tuple(inputs), tuple(states), read, kept, of_layers)


@dataclass(frozen=True, kw_only=True)
class ScoredNodes:
    """The trees of R requests whose T rows a pass has."""

    cu_nodes: Tensor
    """int32 ``[R + 1]``: rows ``cu_nodes[r]`` to ``cu_nodes[r + 1]`` are request r's, in stored
    order."""
    slots: Tensor  # int32 or int64 ``[R]``: request slots; padding has -1
    parents: Tensor  # int32 ``[N]``, or ``[S, N]`` by slot: each node's; the root's is -1
    ancestors: Tensor  # bool ``[N, N]``, or ``[S, N, N]``: which nodes each sees, itself included
    depth: int  # of the deepest node, at least
    state_indices: Tensor  # int32 ``[R]``: block of each request's state; 0 or less: padding


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
        history: ``[blocks, W - 1, C]``, with any strides.
        kept: Its inputs are written, of this ``layer``.
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


def score_heads(
    kernel: Any, *inputs: Any, nodes: ScoredNodes, states: Tensor, kept: KeptNodes, layer: int,
    output: Tensor,
) -> None:  # fmt: skip
    """Launches a kind's kernel, each program for one request, one head and a part of its values.

    Args:
        kernel, inputs: Of the kind, and its own arguments, which come first.
        nodes: The trees, of `MOST_RECURRENT_NODES` nodes at most.
        states: ``[blocks, Hv, V, K]``, contiguous in a block.
        kept: Its keys, updates and decays are written, of this ``layer``.
        output: ``[T, Hv, V]``, contiguous; padding's rows are left alone.

    Raises:
        ValueError: Trees have more nodes.
    """
    if (most := nodes.ancestors.shape[-1]) > MOST_RECURRENT_NODES:
        limit = f"{MOST_RECURRENT_NODES} at most"
        raise ValueError(f"trees of {most} nodes over recurrent layers: {limit}")
    shape = kept.shape
    assert shape is not None
    part = _LEAST if most > 32 else shape.part
    if (requests := len(nodes.state_indices)) > 0:
        kernel[(requests, shape.value_heads, shape.value // part)](
            *inputs, states, states.stride(0), nodes.state_indices, nodes.cu_nodes, nodes.slots,
            nodes.ancestors, rows_per_slot(nodes.ancestors, 2), most, kept.keys[layer],
            kept.updates[layer], kept.decays[layer], output,
            HEADS=shape.heads, VALUE_HEADS=shape.value_heads, KEY=shape.key, VALUE=shape.value,
            KEY_PART=_LEAST if most > 32 else min(_KEY_PART, shape.key),
            NODES=max(_LEAST, triton.next_power_of_2(most)), PART=part,
            num_warps=8 if most > 32 else 4, num_stages=1,
            maxnreg=None if most > 32 else REGISTERS,
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
    history, width = caches.inputs[0], caches.inputs[0].shape[1] + 1
    path = (
        nodes.state_indices, nodes.cu_nodes, accepted, accepted.stride(0), depth,
        block_table, block_table.stride(0), context_lens, block_size,
    )  # fmt: skip
    columns = max(_LEAST, triton.next_power_of_2(depth + 1))
    layers, (_, rows, channels) = len(caches.places), kept.inputs.shape
    commit_inputs_kernel[(requests, layers, triton.cdiv(channels, _COMMITTED_CHANNELS))](
        caches.input_addresses, caches.places, history.stride(0), history.stride(2),
        history.stride(1), kept.inputs, rows, channels, *path,
        TYPE=_TYPES[history.dtype], WIDTH=width, PATH=columns, CHANNELS=_COMMITTED_CHANNELS,
        num_warps=4,
    )  # fmt: skip
    if (shape := kept.shape) is None:
        return
    states, key_part = caches.states[0], min(_COMMITTED_KEYS, shape.key)
    parts = shape.value // shape.part * (shape.key // key_part)
    commit_kernel: Any = commit_channels_kernel if shape.by_channel else commit_states_kernel
    commit_kernel[(requests, layers * shape.value_heads, parts)](
        caches.state_addresses, caches.places, states.stride(0), kept.keys, kept.updates,
        kept.decays, rows, *path,
        TYPE=_TYPES[states.dtype], HEADS=shape.heads, VALUE_HEADS=shape.value_heads,
        KEY=shape.key, VALUE=shape.value, KEY_PART=key_part, PATH=columns, PART=shape.part,
        num_warps=4, num_stages=1,
    )  # fmt: skip
