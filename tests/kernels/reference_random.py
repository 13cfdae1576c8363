"""Philox and what is made of it, in NumPy."""

import numpy as np

from sequoia_vllm.gpu_check.references import philox


def philox_reference(seed, tokens, position, node, purpose):
    """uint64 ``[tokens, 4]``: four 32-bit words by Philox-4x32-10, key ``seed``."""
    words = philox(seed, np.asarray(tokens, dtype=np.uint64), position, node, purpose)
    return np.stack(words, axis=-1)


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
