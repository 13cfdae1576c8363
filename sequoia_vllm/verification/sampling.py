"""Drafting: the children of a node, drawn without replacement (section 3.2.2).

The verifiers are lossless only for children that were drawn from exactly the Q they test against.
So Q has one definition, `draft_distribution`, and the sampler draws from its result.

**Truncation.** Where a request's min-p, top-k or top-p cuts the target's P off, Q leans into the
nucleus: docs/internals.md says why tokens outside are lowered and not excluded.

**Retrieval.** Q also prefers tokens that the request's own text says come next (`retrieval`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor
from torch.nn.functional import threshold

from sequoia_vllm.verification.retrieval import preferred

LOWERED_BY = 4.0
"""Scaled logits outside the nucleus are lowered by this: to 1/55 of their weight.

With 2 a tenth of what the first child gains is lost. With 8 the first child gains no more. Later
children gain a little less: they find tokens that only the target's nucleus holds.
"""
LARGEST_NUCLEUS = 256
"""Most tokens of a nucleus. Larger ones are not looked for, and nothing is lowered."""

FEWEST_TOKENS, FEWEST_ENTRIES, BLOCK = 4_096, 32_768, 256
"""Vocabulary and entries of Q from which on it is drawn from by blocks, and a block's tokens."""


@overload
def is_greedy(temperature: float) -> bool: ...
@overload
def is_greedy(temperature: Tensor) -> Tensor: ...
def is_greedy(temperature: float | Tensor) -> bool | Tensor:
    """Whether a temperature, or each of a tensor's, means argmax: below vLLM's own limit."""
    return temperature < 1e-5


@dataclass(frozen=True)
class Truncation:
    """Sampling parameters of R rows that exclude tokens; None where no row has any."""

    top_k: Tensor | None = None  # int ``[R]``, V in rows without
    top_p: Tensor | None = None  # float32 ``[R]``, 1 likewise
    min_p: Tensor | None = None  # float32 ``[R]``, 0 likewise

    def __bool__(self) -> bool:
        return any(values is not None for values in (self.top_k, self.top_p, self.min_p))

    def of(self, rows: Tensor) -> Truncation:
        """The parameters of these rows, int64 ``[A]``, which may repeat."""
        given = (self.top_k, self.top_p, self.min_p)
        return Truncation(*(None if values is None else values[rows] for values in given))


NOTHING_CUT = Truncation()
"""No row has any of the parameters."""


def draft_distribution(
    logits: Tensor,
    temperature: Tensor,
    truncation: Truncation = NOTHING_CUT,
    given: Tensor | None = None,
) -> Tensor:
    """Q: the distribution that a node's children are drawn from.

    Args:
        logits: ``[R, V]``, any floating type. A row needs one finite entry, and has neither NaN nor
            +inf: this is not checked, as the host would wait for the device. Such a row's Q is NaN.
        temperature: float32 ``[R]``, above 0.
        given: See `preferred`; None: no row has one.

    Returns:
        float32 ``[R, V]``; what is too small for a normal float32 is zero.
    """
    # Subnormals become zero. Some devices flush them at the next operation, and then the sampler
    # and the verifier would disagree on what Q can still draw.
    probabilities = torch.softmax(draft_scores(logits, temperature, truncation, given), dim=1)
    return threshold(probabilities, torch.finfo(torch.float32).tiny, 0.0, inplace=True)


def draft_scores(
    logits: Tensor, temperature: Tensor, truncation: Truncation, given: Tensor | None
) -> Tensor:
    """What Q is the softmax of, float32 ``[R, V]``; arguments as of `draft_distribution`."""
    scaled = lower_outside(logits.float() / temperature[:, None], truncation)
    return scaled if given is None else preferred(scaled, given)


def draw_without_replacement(
    draft: Tensor, k: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draws ``k`` different tokens per row from Q, in draft order.

    The i-th token is drawn from Q renormalised over the tokens not yet drawn; once Q has none
    left (-inf logits, underflow), uniformly from the rest. That is what Algorithm 2 assumes of
    a node's children.

    Large vocabularies are drawn from by blocks, `_draw_by_blocks`, others by a race, `_race`.

    Args:
        draft: Q, float32 ``[R, V]``, from `draft_distribution`.
        k: How many tokens, 0 to V.
        generator: One stream, on Q's device; None: torch's default one.

    Returns:
        int64 ``[R, k]``.
    """
    if draft.shape[1] < FEWEST_TOKENS or draft.numel() < FEWEST_ENTRIES:
        return _race(draft, k, generator)
    drawn, left = _draw_by_blocks(draft, k, generator)
    if (left == 0).any():  # some rows had fewer tokens than were asked for
        return torch.where(left > 0, drawn, _race(draft, k, generator))
    return drawn


def _race(draft: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    """Token x arrives at time E[x] / Q[x], with E exponential. The order of arrival is the order of
    draws (the Gumbel-top-k trick without its logarithms). Tokens with Q[x] = 0 come after all
    others, in the order of E alone."""
    arrival = _exponential(draft, generator)
    return torch.where(draft > 0, draft / arrival, -arrival).topk(k, dim=1).indices


def _draw_by_blocks(
    draft: Tensor, k: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draws a block of tokens by its weight, then a token of the block, k times.

    Noise for all of a vocabulary would take longer than the draft's pass. Also returns the weight
    before the last draw, float64 ``[R, 1]``: where it is 0 the row means nothing.
    """
    rows, vocabulary = draft.shape
    count = vocabulary // BLOCK
    whole, rest = draft[:, : count * BLOCK], draft[:, count * BLOCK :]
    parts = whole.unflatten(1, (count, BLOCK)).sum(dim=2), rest.sum(dim=1, keepdim=True)
    weights = torch.cat(parts, dim=1).double()
    places = torch.arange(BLOCK, device=draft.device)
    shape = k, 2, rows, 1
    uniforms = torch.rand(shape, dtype=torch.float64, device=draft.device, generator=generator)
    drawn = torch.full((rows, k), -1, dtype=torch.int64, device=draft.device)
    left = torch.ones_like(weights[:, :1])
    for draw, (of_block, of_token) in enumerate(uniforms):
        left = weights.sum(dim=1, keepdim=True)
        block = _inverse(weights, of_block)
        tokens = block * BLOCK + places
        inside = draft.gather(1, tokens.clamp(max=vocabulary - 1)).double()
        is_gone = (tokens[:, :, None] == drawn[:, None]).any(dim=2)
        inside.masked_fill_(is_gone | (tokens >= vocabulary), 0.0)
        place = _inverse(inside, of_token)
        drawn[:, draw] = (block * BLOCK + place)[:, 0].clamp(max=vocabulary - 1)
        # Summed anew: what is left may be much smaller than what was drawn.
        weights.scatter_(1, block, inside.scatter(1, place, 0.0).sum(dim=1, keepdim=True))
    return drawn, left


def _inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64 ``[R, 1]``: entries of ``[R, n]``, each with the chance of its weight."""
    ends = weights.cumsum(dim=1)
    found = torch.searchsorted(ends, uniforms * ends[:, -1:], right=True)
    return found.clamp_(max=weights.shape[1] - 1)


def _exponential(like: Tensor, generator: torch.Generator | None) -> Tensor:
    # A vocabulary's smallest E decide the race. From float32 uniforms they would be multiples of
    # 2**-24. Once in 16 million one would be zero, and a token of no weight would win.
    # `Tensor.exponential_` takes four times as long on the CPU.
    uniforms = torch.empty_like(like, dtype=torch.float64).uniform_(generator=generator)
    return uniforms.float().neg_().log1p_().neg_()


def lower_outside(scaled: Tensor, truncation: Truncation) -> Tensor:
    """Lowers what the parameters exclude, applied in vLLM's order: min-p, top-k, top-p.

    The best token stays, and of equal ones all or none.

    Args:
        scaled: float32 ``[R, V]``: logits over temperature.

    Returns:
        float32 ``[R, V]``; ``scaled`` itself without any parameters.
    """
    if not truncation:
        return scaled
    outside = scaled < _lowest_inside(scaled, truncation)
    return torch.where(outside, scaled - LOWERED_BY, scaled)


def _lowest_inside(scaled: Tensor, truncation: Truncation) -> Tensor:
    """float32 ``[R, 1]``: the nucleus's lowest; -inf where it has more tokens than we look for."""
    vocabulary = scaled.shape[1]
    # One more, which tells whether the nucleus ends before it. Sorting all takes ten times as long.
    best = scaled.topk(min(LARGEST_NUCLEUS + 1, vocabulary), dim=1).values
    maximum = best[:, :1]
    weights = (best - maximum).exp()
    inside = torch.ones_like(best, dtype=torch.bool)
    if truncation.min_p is not None:
        inside &= weights >= truncation.min_p[:, None]
    if truncation.top_k is not None:
        rank = torch.arange(best.shape[1], device=scaled.device)
        inside &= rank < truncation.top_k[:, None]
    if truncation.top_p is not None:
        all_weights = (scaled - maximum).exp_().sum(dim=1, keepdim=True)
        cut = (weights * inside).sum(dim=1, keepdim=True)
        total = torch.where(inside[:, -1:], all_weights, cut)
        before = weights.cumsum(dim=1) - weights
        inside &= before < truncation.top_p[:, None] * total
    inside[:, 0] = True
    lowest = best.gather(1, inside.sum(dim=1, keepdim=True) - 1)
    return lowest.masked_fill_(inside[:, -1:], float("-inf"))
