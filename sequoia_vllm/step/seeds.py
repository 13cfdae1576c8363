"""Seeded requests: they get the same tokens as from plain vLLM.

vLLM's CPU sampler draws one 31-bit seed per token from the request's generator and returns
``argmax(logits + gumbel(seed))``. A tree node at depth d stands for plain vLLM's d-th next draw. So
the target's token at a node is a *function* of its logits, and matching verifies the request.
"""

import torch
from torch import Tensor

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
    """Follows requests whose prompts come in pieces; each turn continues the last one's seeds.

    The last step of a turn may have drawn seeds for tokens behind its end.
    """

    def __init__(self) -> None:
        self._emitted: dict[str, int] = {}  # tokens of all turns but the last

    def continue_session(
        self, request_id: str, generator: torch.Generator | None, emitted: int
    ) -> None:
        """Sets a session's generator, as its next turn begins, to its state after all tokens.

        ``emitted`` are the tokens of the last turn.
        """
        emitted += self._emitted.get(request_id, 0)
        self._emitted[request_id] = emitted
        if generator is not None:
            generator.manual_seed(generator.initial_seed())
            consume_seeds(generator, emitted)

    def forget(self, request_id: str) -> None:
        """Drops a finished request."""
        self._emitted.pop(request_id, None)


def gumbel_noise(seeds: Tensor, vocab_size: int) -> Tensor:
    """Noise that vLLM's CPU sampler adds to logits, float32 ``[R, V]``, by seeds int64 ``[R]``.

    Drafting alone uses it: a wrong value would lower acceptance, but keep outputs correct.
    """
    token = torch.arange(1, vocab_size + 1)
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
