"""What the kernels should compute: slow, and plain enough to be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.gpu_check.paged import BLOCK_SIZE, PagedCache

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
_32_BITS = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def attention_reference(
    query: Tensor,
    cache: PagedCache,
    layer: int,
    context_lens: Sequence[int],
    query_start_loc: Sequence[int],
    ancestors: Tensor,
    first_node: int,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """float32 ``[T, Hq, D]``; arguments as `sequoia_vllm.kernels.tree_attention` takes them.

    But ``ancestors`` is the bool matrix ``[N, N]``, and NaN is where no request has rows.
    """
    output = torch.full(query.shape, float("nan"), dtype=torch.float32, device=query.device)
    for request, context in enumerate(context_lens):
        first, last = query_start_loc[request], query_start_loc[request + 1]
        nodes = range(first_node, first_node + last - first)
        keys, values = gathered_keys_and_values(cache, layer, request, context + nodes.stop)
        hidden = ~ancestors[nodes.start : nodes.stop, : nodes.stop]
        hidden = torch.cat([hidden.new_zeros(len(nodes), context), hidden], dim=1)
        output[first:last], _ = dense_attention(
            query[first:last], keys * key_scale, values * value_scale, scale, hidden
        )
    return output


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """float32 outputs ``[Q, Hq, D]`` and natural log-sum-exps ``[Hq, Q]``.

    Args:
        query: ``[Q, Hq, D]``.
        keys, values: float32 ``[K, Hkv, D]``; where K is 0, outputs are 0.
        scale: Softmax scale.
        hidden: bool ``[Q, K]``: keys that a row does not see; None: it sees all.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    output = torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), values)
    return output, scores.logsumexp(dim=2)


def gathered_keys_and_values(
    cache: PagedCache, layer: int, request: int, positions: int
) -> tuple[Tensor, Tensor]:
    """float32 ``[positions, Hkv, D]``: keys and values of one request."""
    place = torch.arange(positions, device=cache.block_table.device)
    blocks = cache.block_table[request, place // BLOCK_SIZE].long()
    found = []
    for view in cache.keys_and_values(layer):
        # Not every torch can index fp8.
        stored = view.view(torch.uint8) if view.dtype.itemsize == 1 else view
        found.append(stored[blocks, place % BLOCK_SIZE].view(view.dtype).float())
    return found[0], found[1]


# -- random numbers -----------------------------------------------------------------


def philox(seed: int, tokens: Words, position: int, node: int, purpose: int) -> list[Words]:
    """Four words for each of ``tokens``, by Philox-4x32-10."""
    words = [tokens, *(np.full_like(tokens, value) for value in (position, node, purpose))]
    low, high = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> _32_BITS) ^ words[1] ^ low,
            second & _LOW,
            (first >> _32_BITS) ^ words[3] ^ high,
            first & _LOW,
        ]
        low = (low + np.uint64(0x9E3779B9)) & _LOW
        high = (high + np.uint64(0xBB67AE85)) & _LOW
    return words


def uniform(seed: int, tokens: Words, position: int, node: int, purpose: int) -> Floats:
    """Uniform in (0, 1), by the first 52 of the bits."""
    high, low, *_ = philox(seed, tokens, position, node, purpose)
    bits = ((high << _32_BITS) | low) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def uniform_of(seed: int, position: int, node: int, purpose: int) -> float:
    """The one that is for no token."""
    return float(uniform(seed, np.zeros(1, np.uint64), position, node, purpose)[0])


def target_noise(seed: int, position: int, vocabulary: int) -> Floats:
    """Gumbel noise of every token, from MurmurHash3: vLLM's for a target's token."""
    tokens = np.arange(vocabulary, dtype=np.uint64)
    hashed = np.zeros_like(tokens)
    for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position & 0xFFFFFFFF):
        hashed = _murmur_block(hashed, np.full_like(tokens, word))
    mixed = _murmur_block(hashed, tokens) ^ np.uint64(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)) & _LOW
    mixed = mixed ^ (mixed >> np.uint64(16))
    return -np.log(-np.log1p(-(mixed.astype(np.float64) + 0.5) * 2.0**-32))


def _murmur_block(hashed: Words, word: Words) -> Words:
    word = (_rotated((word * np.uint64(0xCC9E2D51)) & _LOW, 15) * np.uint64(0x1B873593)) & _LOW
    return (_rotated(hashed ^ word, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & _LOW


def _rotated(value: Words, bits: int) -> Words:
    return ((value << np.uint64(bits)) | (value >> np.uint64(32 - bits))) & _LOW


# -- verification -------------------------------------------------------------------


@dataclass(frozen=True)
class WalkedTree:
    """What Algorithm 2 made of one request's tree.

    Attributes:
        path: Accepted nodes below the root.
        residual: float64 ``[V]``: what the last token is drawn from.
        closest: How near a decision was to the other one, as a share.
    """

    path: list[int]
    residual: Floats
    closest: float


def walk(
    target: Floats,
    draft: Floats,
    tokens: Sequence[int],
    children: Sequence[Sequence[int]],
    inner: Sequence[int],
    seed: int,
    root_position: int,
    purpose: int,
) -> WalkedTree:
    """Algorithm 2 of arXiv 2402.12374, as the paper writes it.

    Args:
        target: ``[N, V]``: the target's distribution at each node.
        draft: ``[I, V]``: Q of each node with children.
        tokens: Of each node.
        children: Nodes below each node, in draft order.
        inner: Row of ``draft`` of each node.
        seed, root_position, purpose: Of the random numbers.
    """
    path: list[int] = []
    closest = np.inf
    node = 0
    while True:
        residual = target[node].copy()
        remaining = draft[inner[node]].copy() if children[node] else None
        allowed = np.ones(len(residual))
        accepted = None
        for child in children[node]:
            assert remaining is not None
            token = tokens[child]
            number = uniform_of(seed, root_position + len(path) + 1, child, purpose)
            ratio = residual[token] / remaining[token] if remaining[token] else np.inf
            closest = min(closest, abs(number - ratio) / number)
            if number < ratio:
                accepted = child
                break
            residual = _normalized(np.maximum(residual - remaining, 0.0))
            allowed[token] = remaining[token] = 0.0
            remaining = _normalized(remaining if remaining.sum() > 0 else allowed)
        if accepted is None:
            return WalkedTree(path, residual, closest)
        path.append(accepted)
        node = accepted


def _normalized(weights: Floats) -> Floats:
    return weights / weights.sum()
