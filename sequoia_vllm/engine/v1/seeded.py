"""Seeded requests: the token plain vLLM would sample, speculation or not.

vLLM's CPU sampler draws one 31-bit seed per token from the request's generator and returns
``argmax(logits + gumbel(seed))``. A tree node at depth d decides the token that plain vLLM would
decide with the d-th next draw. So for a seeded request the target's token at a node is a
*function* of its logits. The request is verified by matching, exactly as a greedy one. Its output
is the one that the seed gives without speculation, whatever else is in the batch and however the
tree is trimmed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.worker.gpu_input_batch import CachedRequestState

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def peek_seeds(generator: torch.Generator, count: int) -> Tensor:
    """The next ``count`` token seeds, int64 ``[count]``, without consuming them."""
    state = generator.get_state()
    seeds = torch.randint(0, 2**31, (count,), generator=generator, dtype=torch.long)
    generator.set_state(state)
    return seeds


def consume_seeds(generator: torch.Generator, count: int) -> None:
    """Advances the generator by the ``count`` tokens that were emitted."""
    torch.randint(0, 2**31, (count,), generator=generator, dtype=torch.long)


class SessionSeeds:
    """Follows requests whose prompts come in pieces: each turn's seeds go on where the last ended.

    The last step of a turn may have drawn for tokens behind its end. The runner calls
    `continue_session` when such a request has its next piece, and `forget` when it has finished.
    """

    def __init__(self) -> None:
        self._emitted: dict[str, int] = {}  # tokens of all turns but the last

    def continue_session(self, state: CachedRequestState, num_computed_tokens: int) -> None:
        """Sets the request's generator to where it was after the tokens that it emitted.

        Args:
            state: The request, as it was in the turn that has ended.
            num_computed_tokens: Its computed tokens as the next turn begins.
        """
        emitted = num_computed_tokens + 1 - state.num_prompt_tokens
        emitted += self._emitted.get(state.req_id, 0)
        self._emitted[state.req_id] = emitted
        if state.generator is not None:
            state.generator.manual_seed(state.generator.initial_seed())
            consume_seeds(state.generator, emitted)

    def forget(self, request_id: str) -> None:
        """The request has finished."""
        self._emitted.pop(request_id, None)


def gumbel_noise(seeds: Tensor, vocab_size: int) -> Tensor:
    """The noise that vLLM's CPU sampler adds to a row's logits.

    Used for drafting only, so that the draft's choice and the target's are
    driven by the same noise and agree often; a wrong value here could cost
    acceptance, never correctness.

    Args:
        seeds: int64 ``[R]``.
        vocab_size: V.

    Returns:
        float32 ``[R, V]``.
    """
    token = torch.arange(1, vocab_size + 1, device=seeds.device)
    bits = _shift(_mix(_mix(seeds)[:, None] + token * _GAMMA), 11)
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform)).float()


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 bit patterns."""
    z = (z ^ _shift(z, 30)) * _MULTIPLIERS[0]
    z = (z ^ _shift(z, 27)) * _MULTIPLIERS[1]
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 tensors hold unsigned bits here."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
