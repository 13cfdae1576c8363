"""Philox and what is made of it, in NumPy."""

import numpy as np

_MASK = np.uint64(0xFFFFFFFF)


def philox_reference(seed, tokens, position, node, purpose):
    """uint64 ``[tokens, 4]``: four 32-bit words by Philox-4x32-10, key ``seed``."""
    tokens = np.asarray(tokens, dtype=np.uint64)
    counter = [np.zeros_like(tokens) + np.uint64(word) for word in (0, position, node, purpose)]
    counter[0] = tokens
    low, high = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    for _ in range(10):
        first = counter[0] * np.uint64(0xD2511F53)
        second = counter[2] * np.uint64(0xCD9E8D57)
        shift = np.uint64(32)
        counter = [
            (second >> shift) ^ counter[1] ^ low,
            second & _MASK,
            (first >> shift) ^ counter[3] ^ high,
            first & _MASK,
        ]
        low, high = (low + np.uint64(0x9E3779B9)) & _MASK, (high + np.uint64(0xBB67AE85)) & _MASK
    return np.stack(counter, axis=-1)


def uniform32_reference(words):
    """float64 ``[tokens]`` of words ``[tokens, 4]``: 56 bits, and half of the last."""
    words = words.astype(np.float64)
    fraction = (np.floor(words[:, 1] / 256) + 0.5) * 2.0**-24
    # In float32 the kernel rounds twice, here: within the sum, and the sum.
    inner = (words[:, 0] % 65536 + fraction.astype(np.float32)).astype(np.float32)
    upper = np.floor(words[:, 0] / 65536) * 2.0**-16
    return (upper.astype(np.float32) + inner * np.float32(2.0**-32)).astype(np.float64)


def exponential_reference(seed, tokens, position, node, purpose):
    """float64 ``[tokens]``."""
    words = philox_reference(seed, tokens, position, node, purpose)
    return -np.log1p(-uniform32_reference(words))
