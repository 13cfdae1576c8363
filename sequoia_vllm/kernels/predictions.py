# mypy: allow-untyped-defs
"""Follows what users foretell on the device: `verification.prediction.Prediction` in Triton.

A *record* holds one request's prediction and what is remembered of it. A table has the address of
each request slot's record. So a captured graph finds it, and slots without one take no memory.
"""

import math
from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from sequoia_vllm.verification import prediction
from sequoia_vllm.verification.prediction import Prediction

_REACH, _MOST_EVIDENCE = tl.constexpr(prediction.REACH), tl.constexpr(prediction.MOST_EVIDENCE)
_LEAST, _NEAR = tl.constexpr(prediction.LEAST), tl.constexpr(prediction.NEAR)
_FALL, _LEAST_TRUST = tl.constexpr(prediction.FALL), tl.constexpr(prediction.LEAST_TRUST)
_LOG2_OF_REST = tl.constexpr(math.log2(1 - prediction.RISE))
_START, _NO_OUTPUT = tl.constexpr(prediction.START), tl.constexpr(prediction.BEFORE_OUTPUT)
_LOST = tl.constexpr(-1)
# Of a record: tokens of the prompt and of the prediction; then what `Prediction` remembers.
_PROMPT, _LENGTH, _SEEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NEXT, _DIAGONAL, _TRUST = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_BRANCHES = tl.constexpr(6)  # 1: its request may have branches
_WEIGHTS = tl.constexpr(7)  # and behind them the tokens
_PLACES = tl.constexpr(128)  # that are compared at once


def new_record(tokens: Sequence[int], prompt: int, branches: bool = False) -> NDArray[np.int32]:
    """A request's record, int32 ``[71 + P]``, of P tokens and a prompt of so many."""
    trust = int(np.float32(1).view(np.int32))
    known = [prompt, len(tokens), 0, 0, 0, trust, branches]
    return np.concatenate([known, prediction.WEIGHTS, Prediction(tokens).tokens]).astype(np.int32)


@triton.jit
def follow_prediction(record, text, last):
    """Takes a text up to position ``last``, behind its prompt, as `Prediction.follow` does.

    Returns the address of the token that comes next, how many are told from there on, and how many
    of the last tokens match before it.
    """
    length = tl.load(record + _LENGTH)
    seen, place = tl.load(record + _SEEN), tl.load(record + _NEXT)
    tokens = record + _WEIGHTS + _REACH
    prompt = tl.load(record + _PROMPT)
    output, written = text + prompt, last + 1 - prompt
    # What became of the tokens that were told.
    new = written - seen
    left = tl.where(place == _LOST, 0, length - place)
    hits = new
    for first in range(0, new, _PLACES):
        ahead = first + tl.arange(0, _PLACES)
        is_told = ahead < tl.minimum(new, left)
        told = tl.load(tokens + _REACH + place + ahead, mask=is_told, other=-2)
        token = tl.load(output + seen + ahead, mask=ahead < new, other=-1)
        hits = tl.minimum(hits, tl.min(tl.where(told == token, new, ahead), axis=0))
    trust = tl.load(record + _TRUST).to(tl.float32, bitcast=True)
    trust = 1 - (1 - trust) * tl.exp2(hits.to(tl.float32) * _LOG2_OF_REST)
    trust = tl.where((hits < new) & (hits < left), trust * (1 - _FALL), trust)
    # The best of all places.
    diagonal = tl.load(record + _DIAGONAL) + new
    back = tl.arange(0, _REACH)
    at = written - _REACH + back
    latest = tl.load(output + at, mask=at >= 0, other=_NO_OUTPUT)
    latest = tl.where(at == -1, _START, latest)
    weights = tl.load(record + _WEIGHTS + back)
    best = length.to(tl.int64) * 0
    for first in range(0, length + 1, _PLACES):
        end = first + tl.arange(0, _PLACES)
        exists = end <= length
        token = tl.load(tokens + end[:, None] + back[None, :], mask=exists[:, None], other=-1)
        score = tl.sum(tl.where(token == latest[None, :], weights[None, :], 0), axis=1)
        score += _NEAR // (1 + tl.abs(end - diagonal))
        ranked = (score.to(tl.int64) << 32) | (length - end).to(tl.int64)  # then the first
        best = tl.maximum(best, tl.max(tl.where(exists, ranked, -1), axis=0))
    found = length - (best & 0xFFFFFFFF).to(tl.int32)
    is_same = tl.load(tokens + found + back) == latest
    run = _REACH - 1 - tl.max(tl.where(is_same, -1, back), axis=0)
    score = tl.sum(tl.where(is_same, weights, 0), axis=0)
    is_sure = (run * trust >= _LEAST_TRUST) | (run >= _MOST_EVIDENCE)
    follows = ((trust >= _LEAST_TRUST) | is_sure) & (score >= _LEAST)
    tl.store(record + _SEEN, written)
    tl.store(record + _NEXT, tl.where(follows, found, _LOST))
    tl.store(record + _DIAGONAL, tl.where(follows, found, diagonal))
    tl.store(record + _TRUST, trust.to(tl.int32, bitcast=True))
    return tokens + _REACH + found, tl.where(follows, length - found, 0), run
