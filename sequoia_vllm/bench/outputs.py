"""Whether greedy outputs of different methods agree, and what a difference means.

In float32 every difference is an error. In half precision the same token may be
scored in a batch of another shape, where sums are rounded differently, so that
of two tokens with nearly equal logits either may win. A difference there is
looked into: the target scores the whole output once more, and every token from
the difference on must be within `NEAR_TIE` of the target's best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Difference in log-probability that rounding may turn around, nats: two units in
# the last place of a logit between 16 and 32, as bfloat16 and float16 store it.
NEAR_TIE = {"bfloat16": 0.25, "float16": 0.03125}


@dataclass(frozen=True)
class Difference:
    """Where one output first differs from plain vLLM's.

    Attributes:
        prompt: Number of the prompt, from 0.
        position: Tokens that agree before it.
        token: The method's token there; None: it ended.
        plain_token: Plain vLLM's; None: it ended.
    """

    prompt: int
    position: int
    token: int | None
    plain_token: int | None


def first_difference(prompt: int, found: Sequence[int], plain: Sequence[int]) -> Difference | None:
    """Where two outputs differ; None: nowhere."""
    for position in range(max(len(found), len(plain))):
        token = found[position] if position < len(found) else None
        expected = plain[position] if position < len(plain) else None
        if token != expected:
            return Difference(prompt, position, token, expected)
    return None


def is_near_tie(difference: Difference, gaps: Sequence[float], dtype: str) -> bool:
    """Whether rounding explains a difference.

    Args:
        difference: The first one.
        gaps: For each token of the method's output, how much likelier than it
            the target finds its best token there (log-probability, nats).
        dtype: Of weights and activations.
    """
    bound = NEAR_TIE.get(dtype)
    if bound is None or difference.token is None or difference.plain_token is None:
        return False
    return max(gaps[difference.position :]) <= bound
