"""Trees over a Gated DeltaNet layer in float64: each path walked by the plain recurrence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Layer:
    """Weights of a layer: ``[C, W]``, ``[C]`` or None, ``[Hv]`` and ``[Hv]``; sizes of its heads.

    A token's inputs are queries ``[H, K]``, keys ``[H, K]`` and values ``[Hv, V]``, flat.
    """

    weights: Tensor
    bias: Tensor | None
    log_a: Tensor
    dt_bias: Tensor
    heads: tuple[int, int]
    sizes: tuple[int, int]


def step(
    layer: Layer, inputs: Tensor, state: Tensor, token: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes one token.

    Args:
        layer: The layer.
        inputs: ``[W - 1, C]``: those of the tokens before, the oldest first.
        state: ``[Hv, V, K]``.
        token: ``[C]``: its inputs.
        a, b: ``[Hv]``: its gates.

    Returns:
        Its output ``[Hv, V]``, and inputs and state after it.
    """
    (heads, value_heads), (key_size, value_size) = layer.heads, layer.sizes
    window = torch.cat([inputs.double(), token.double()[None]])
    sums = (window * layer.weights.double().T).sum(0)
    if layer.bias is not None:
        sums = sums + layer.bias.double()
    mixed = sums / (1 + torch.exp(-sums))
    query, key, value = mixed.split([heads * key_size, heads * key_size, value_heads * value_size])
    group = value_heads // heads
    query, key = (
        (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 0)
        for each in (query.view(heads, key_size), key.view(heads, key_size))
    )
    gate = a.double() + layer.dt_bias.double()
    softplus = torch.where(gate > 20, gate, torch.log1p(torch.exp(gate)))
    decay = torch.exp(-torch.exp(layer.log_a.double()) * softplus)
    strength = 1 / (1 + torch.exp(-b.double()))
    state = state.double() * decay[:, None, None]
    missing = value.view(value_heads, value_size) - torch.einsum("hvk,hk->hv", state, key)
    state = state + torch.einsum("hv,hk->hvk", strength[:, None] * missing, key)
    output = torch.einsum("hvk,hk->hv", state, query) * key_size**-0.5
    return output, window[1:], state


def walk(
    layer: Layer, inputs: Tensor, state: Tensor, tokens: Tensor, a: Tensor, b: Tensor,
    path: Sequence[int],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Outputs, inputs and states after each node of a path; ``tokens``, ``a``, ``b`` by node."""
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for node in path:
        output, inputs, state = step(layer, inputs, state, tokens[node], a[node], b[node])
        for values, value in zip(found, (output, inputs, state), strict=True):
            values.append(value)
    return found
