"""The numbers that our kernels, and vLLM's, compute from seeds, in NumPy.

A number is a function of the request's seed and of what it is for: token, position, node and
purpose. Words are integers below 2**32, held as uint64.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Tokens = Sequence[int] | NDArray[np.integer]
_32_BITS = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def philox(seed: int, tokens: Tokens, position: int, node: int, purpose: int) -> Words:
    """Four words for each of ``tokens``, ``[tokens, 4]``: Philox-4x32-10 under the key ``seed``."""
    first = np.asarray(tokens).astype(np.uint64)
    words = [first, *(np.full_like(first, value) for value in (position, node, purpose))]
    low, high = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    for _ in range(10):
        one, other = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (other >> _32_BITS) ^ words[1] ^ low, other & _LOW, (one >> _32_BITS) ^ words[3] ^ high,
            one & _LOW,
        ]  # fmt: skip
        low = (low + np.uint64(0x9E3779B9)) & _LOW
        high = (high + np.uint64(0xBB67AE85)) & _LOW
    return np.stack(words, axis=-1)


def uniform64(words: Words) -> Floats:
    """Uniform in (0, 1), ``[tokens]``, by the first 52 bits of words ``[tokens, 4]``."""
    bits = ((words[:, 0] << _32_BITS) | words[:, 1]) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def uniform32(words: Words) -> Floats:
    """Uniform in (0, 1], ``[tokens]``, by 56 bits of words ``[tokens, 4]``; as float32 has it."""
    numbers = words.astype(np.float64)
    fraction = (np.floor(numbers[:, 1] / 256) + 0.5) * 2.0**-24
    # In float32 the kernel rounds twice, here: within the sum, and the sum.
    inner = (numbers[:, 0] % 65536 + fraction.astype(np.float32)).astype(np.float32)
    upper = np.floor(numbers[:, 0] / 65536) * 2.0**-16
    rounded = upper.astype(np.float32) + inner * np.float32(2.0**-32)
    return rounded.astype(np.float64)


def uniform_of(seed: int, position: int, node: int, purpose: int) -> float:
    """The number in (0, 1) that is for no token: what decides a node, or draws the last token."""
    return float(uniform64(philox(seed, [0], position, node, purpose))[0])


def exponential(seed: int, tokens: Tokens, position: int, node: int, purpose: int) -> Floats:
    """Exponential of mean 1, ``[tokens]``."""
    return -np.log1p(-uniform32(philox(seed, tokens, position, node, purpose)))


def race_scores(draft: Floats, arrivals: Floats) -> Floats:
    """Largest where a token comes first in the race that draws without replacement.

    Tokens arrive after exponential times of rate Q (Efraimidis and Spirakis), and those
    without any Q after all others, in the order of their times.

    Args:
        draft: Q, ``[V]``.
        arrivals: `exponential` times of rate 1, ``[V]``.
    """
    with np.errstate(divide="ignore"):
        return np.where(draft > 0, np.log(draft) - np.log(arrivals), -1e6 - arrivals)


def target_noise(seed: int, position: int, vocabulary: int) -> Floats:
    """Gumbel noise of every token, from MurmurHash3: vLLM's for a target's token, ``[V]``."""
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
