"""Trees over recurrent layers in float64: each path walked by the plain recurrence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass
class Convolution:
    """A short convolution alone: weights ``[C, W]``, bias ``[C]`` or None."""

    weights: Tensor
    bias: Tensor | None

    def mixed(self, window: Tensor) -> Tensor:
        """The convolution of ``[W, C]``: a token's inputs behind those of the tokens before."""
        sums = (window.double() * self.weights.double().T).sum(0)
        return sums if self.bias is None else sums + self.bias.double()

    def step(self, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Takes one token.

        Args:
            window: ``[W, C]``.
            state: Of the layer; here none.

        Returns:
            Its output, and the state after it.
        """
        return self.mixed(window), state


@dataclass
class GdnLayer(Convolution):
    """A Gated DeltaNet layer: ``[Hv]`` and ``[Hv]``; numbers and sizes of its heads.

    A token's inputs are queries ``[H, K]``, keys ``[H, K]`` and values ``[Hv, V]``, flat. Its gates
    a and b are ``[Hv]``, its state is ``[Hv, V, K]``.
    """

    log_a: Tensor
    dt_bias: Tensor
    heads: tuple[int, int]
    sizes: tuple[int, int]

    def step(self, window, state, a, b):  # type: ignore[no-untyped-def, override]
        """See `Convolution.step`; the output is ``[Hv, V]``."""
        (heads, value_heads), (key_size, value_size) = self.heads, self.sizes
        mixed = functional.silu(self.mixed(window))
        keys = heads * key_size
        query, key, value = mixed.split([keys, keys, value_heads * value_size])
        group = value_heads // heads
        query, key = (
            (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 0)
            for each in (query.view(heads, key_size), key.view(heads, key_size))
        )
        dt = functional.softplus(a.double() + self.dt_bias.double())
        decay = torch.exp(-torch.exp(self.log_a.double()) * dt)
        strength = b.double().sigmoid()
        state = state.double() * decay[:, None, None]
        missing = value.view(value_heads, value_size) - torch.einsum("hvk,hk->hv", state, key)
        state = state + torch.einsum("hv,hk->hvk", strength[:, None] * missing, key)
        return torch.einsum("hvk,hk->hv", state, query) * key_size**-0.5, state


@dataclass
class KdaLayer(Convolution):
    """A layer of Kimi Delta Attention: ``[H]`` and ``[H * K]``; the gates' bound, or None.

    A token's inputs are queries, keys ``[H, K]`` each and values ``[H, V]``, flat. Its gates are
    ``[H * K]`` and ``[H]``, its state is ``[H, V, K]``.
    """

    log_a: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    heads: int
    sizes: tuple[int, int]

    def step(self, window, state, gates, strengths):  # type: ignore[no-untyped-def, override]
        """See `Convolution.step`; the output is ``[H, V]``."""
        heads, (key_size, value_size) = self.heads, self.sizes
        mixed = functional.silu(self.mixed(window))
        keys = heads * key_size
        query, key, value = mixed.split([keys, keys, heads * value_size])
        query, key = (
            each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            for each in (query.view(heads, key_size), key.view(heads, key_size))
        )
        gates = (gates.double() + self.dt_bias.double()).view(heads, key_size)
        rate = self.log_a.double().exp()[:, None]
        if self.lower_bound is None:
            decay = torch.exp(-rate * functional.softplus(gates))
        else:
            decay = torch.exp(self.lower_bound * torch.sigmoid(rate * gates))
        state = state.double() * decay[:, None, :]
        missing = value.view(heads, value_size) - torch.einsum("hvk,hk->hv", state, key)
        update = strengths.double().sigmoid()[:, None] * missing
        state = state + torch.einsum("hv,hk->hvk", update, key)
        return torch.einsum("hvk,hk->hv", state, query) * key_size**-0.5, state


@dataclass
class LinearLayer(Convolution):
    """A layer of linear attention, which convolves nothing: slopes ``[H]``, sizes of its heads.

    A token's inputs are queries, keys ``[H, K]`` each and values ``[H, V]``, flat. Its state is
    ``[H, V, K]``.
    """

    slopes: Tensor
    sizes: tuple[int, int]

    def step(self, window, state):  # type: ignore[no-untyped-def, override]
        """See `Convolution.step`; the output is ``[H, V]``."""
        heads, (key_size, value_size) = len(self.slopes), self.sizes
        widths = [heads * key_size, heads * key_size, heads * value_size]
        query, key, value = (part.view(heads, -1) for part in window[-1].split(widths))
        kept = torch.exp(-self.slopes.double())[:, None, None] * state.double()
        state = kept + torch.einsum("hv,hk->hvk", value, key)
        return torch.einsum("hvk,hk->hv", state, query), state


@dataclass
class MambaLayer(Convolution):
    """A Mamba2 layer: A, D and the steps' bias, ``[Hv]`` each; numbers and sizes of its heads.

    A token's inputs are x ``[Hv, V]``, B ``[H, K]`` and C ``[H, K]``, flat. Its step dt is
    ``[Hv]``, its state ``[Hv, V, K]``.
    """

    a: Tensor
    d: Tensor
    dt_bias: Tensor
    heads: tuple[int, int]
    sizes: tuple[int, int]

    def step(self, window, state, dt):  # type: ignore[no-untyped-def, override]
        """See `Convolution.step`; the output is ``[Hv, V]``."""
        (groups, heads), (state_size, head_size) = self.heads, self.sizes
        vectors = groups * state_size
        parts = functional.silu(self.mixed(window)).split([heads * head_size, vectors, vectors])
        x = parts[0].view(heads, head_size)
        b, c = (
            each.view(groups, state_size).repeat_interleave(heads // groups, 0)
            for each in parts[1:]
        )
        dt = functional.softplus(dt.double() + self.dt_bias.double())
        kept = torch.exp(self.a.double() * dt)[:, None, None] * state.double()
        state = kept + torch.einsum("h,hv,hk->hvk", dt, x, b)
        return torch.einsum("hvk,hk->hv", state, c) + self.d.double()[:, None] * x, state


def walk(
    layer: Convolution, inputs: Tensor, state: Tensor, tokens: Tensor, gates: Sequence[Tensor],
    path: Sequence[int],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Outputs, inputs and states after each node of a path; ``tokens`` and ``gates`` by node.

    ``inputs`` are ``[W - 1, C]``: those of the tokens before, the oldest first.
    """
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for node in path:
        window = torch.cat([inputs.double(), tokens[node].double()[None]])
        inputs = window[1:]
        output, state = layer.step(window, state, *(gate[node] for gate in gates))
        for values, value in zip(found, (output, inputs, state), strict=True):
            values.append(value)
    return found
