# mypy: allow-untyped-defs
"""Random numbers that kernels compute from their purpose, instead of from a state.

A number is a function of the request's seed and a key: token, position, node and purpose. So a
request's numbers do not depend on its neighbours in the batch. Nor do they depend on how the work
is cut into blocks, or on the order in which programs run.

Position is the node's: root position + depth. A node's index fixes its depth and
every step's root lies further on, so no number is used twice.
"""

import triton
import triton.language as tl

DRAW = tl.constexpr(0)
"""Purpose: drawing a node's children."""
VERIFY = tl.constexpr(1)
"""Purpose: accepting or rejecting a node."""
RESIDUAL = tl.constexpr(2)
"""Purpose: sampling the token that ends the walk."""

# Terms of the series for log(1 - u) on [0, 0.25]: its error is below half a unit
# in the last place of float32.
_EXACT_TERMS = tl.constexpr(13)
# vLLM takes this many, so the noise is equal to its own.
_VLLM_TERMS = tl.constexpr(8)


@triton.jit
def random_words(seed, token, position, node, purpose):
    """Four independent uint32 by Philox-4x32-10.

    Args:
        seed: int64, scalar: the request's.
        token, position, node: Integers below 2**32; one may be a block, the others
            scalars or blocks that broadcast with it.
        purpose: DRAW, VERIFY or RESIDUAL.
    """
    return tl.philox(
        seed,
        tl.cast(token, tl.uint32),
        tl.cast(position, tl.uint32),
        tl.cast(node, tl.uint32),
        tl.cast(purpose, tl.uint32),
    )


@triton.jit
def uniform32(seed, token, position, node, purpose):
    """Uniform float32 in (0, 1], with 24 significant bits down to 2**-32, fewer below; 2**-57 at
    least. Arguments as in `random_words`."""
    high, low, _, _ = random_words(seed, token, position, node, purpose)
    # By halves, which float32 holds exactly. A plain conversion would drop the bits in which small
    # numbers differ.
    upper = (high >> 16).to(tl.int32).to(tl.float32)
    lower = (high & 0xFFFF).to(tl.int32).to(tl.float32)
    fraction = ((low >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return upper * 1.52587890625e-05 + (lower + fraction) * 2.3283064365386963e-10


@triton.jit
def uniform64(seed, token, position, node, purpose):
    """Uniform float64 in (0, 1): an odd multiple of 2**-53. Arguments as in `random_words`."""
    high, low, _, _ = random_words(seed, token, position, node, purpose)
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 12
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def exponential(seed, token, position, node, purpose):
    """Exponential float32 of mean 1, above 0 and at most 16.7. Arguments as in `random_words`.

    In races the smallest of many decides: small ones are as exact as float32 can be.
    """
    return -_log_one_minus(uniform32(seed, token, position, node, purpose), _EXACT_TERMS)


@triton.jit
def target_noise(seed, position, token):
    """The Gumbel noise that vLLM's Model Runner V2 adds to a target's logit, to the bit.

    So a draft under the same noise proposes what the target will pick, where their
    logits agree. It is MurmurHash3 (32 bits) of seed, position and token, read as
    ``-log(-log(1 - u))``; as in every vLLM that we support, without ``use_fp64_gumbel``.

    Args:
        seed: int64, scalar: the request's.
        position: Integer, scalar: of the input token that the logits come from.
        token: int32, block.

    Returns:
        float32, shape of ``token``.
    """
    seed = seed.to(tl.int64)
    hashed = _murmur_block(_first_word(seed) ^ _first_word(seed), _first_word(seed))
    hashed = _murmur_block(hashed, _first_word(seed >> 32))
    hashed = _murmur_block(hashed, _first_word(position.to(tl.int64)))
    hashed = _murmur_block(hashed, token.to(tl.uint32))
    hashed = _murmur_end(hashed ^ 16)  # bytes hashed
    upper = (hashed >> 16).to(tl.int32).to(tl.float32)
    lower = (hashed & 0xFFFF).to(tl.int32).to(tl.float32)
    uniform = upper * 1.52587890625e-05 + (lower + 0.5) * 2.3283064365386963e-10
    return -tl.log(-_log_one_minus(uniform, _VLLM_TERMS))


@triton.jit
def _log_one_minus(value, TERMS: tl.constexpr):
    """log(1 - value) for value in [0, 1], at least log(2**-24).

    By its series for small values, where 1 - value would round their bits away.
    """
    series = 1.0 / TERMS
    for term in tl.static_range(TERMS - 1, 0, -1):
        series = 1.0 / term + value * series
    direct = tl.log(tl.maximum(1.0 - value, 5.960464477539063e-08))
    return tl.where(value < 0.25, -value * series, direct)


@triton.jit
def _first_word(value):
    return (value & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _rotate_left(value, bits: tl.constexpr):
    return (value << bits) | (value >> (32 - bits))


@triton.jit
def _murmur_block(hashed, word):
    word = _rotate_left(word * 0xCC9E2D51, 15) * 0x1B873593
    return _rotate_left(hashed ^ word, 13) * 5 + 0xE6546B64


@triton.jit
def _murmur_end(hashed):
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    return hashed ^ (hashed >> 16)
