"""A profile for models that nobody timed, from those of other sizes on the same device.

For devices without a datasheet, such as CPUs. A pass over so many tokens takes what the
measured passes over as many tokens take, those of the models nearest in bytes of weights
below and above, linearly between them:

- above the largest measured model time grows with the bytes;
- below the smallest one it does not fall: what is left is launches.

The rest of a step is that of the measured pair whose target is nearest. Not modelled: how many
layers the bytes are spread over, contexts, and what a larger vocabulary costs outside the
output matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from sequoia_vllm.hardware.cost import CostModel, Floats
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.roofline import bytes_per_value
from sequoia_vllm.hardware.step_profile import Curve, Profile
from sequoia_vllm.hardware.streaming import StreamedWeights

Seconds = Callable[[list[int], int], Floats]


def scaled_profile(
    measured: Sequence[Profile],
    target: ModelShape,
    draft: ModelShape,
    dtype: str,
    streamed: StreamedWeights | None = None,
) -> Profile:
    """The profile that measurements of other models suggest.

    Args:
        measured: Profiles of the device; at least one.
        target, draft: What to estimate.
        dtype: Weight type; as of `bytes_per_value`.
        streamed: Weights of the target that each pass reads from outside the memory.

    Raises:
        ValueError: If a type is not known, or weights are quantized: they take less time to
            read and as much to compute with, which measurements of others do not tell apart;
            or the draft drafts in one pass: how long drawing alone takes nobody measured.
    """
    if target.layer_weight_bytes or draft.layer_weight_bytes:
        raise ValueError("times of quantized weights cannot be scaled from measured ones")
    if draft.drafts_in_one_pass:
        raise ValueError("times of heads that draft in one pass cannot be scaled from others")
    passes = _Passes(measured)
    value_bytes = bytes_per_value(dtype)
    target_bytes, draft_bytes = (shape.matmul_bytes(value_bytes) for shape in (target, draft))
    basis = min(
        measured, key=lambda p: abs(math.log(target_bytes / _bytes(p.target_parameters, p)))
    )
    most = min(max(curve.tokens[-1] for curve in p.target_forward) for p in measured)

    def curve_of(curve: Curve, size: float, weights: StreamedWeights | None, most: int) -> Curve:
        tokens = [count for count in curve.tokens if count <= most]
        seconds = passes.seconds(size, tokens, curve.batch_size).tolist()
        if weights is not None:
            seconds = [
                weights.pass_seconds(count * curve.batch_size, computing)
                for count, computing in zip(tokens, seconds, strict=True)
            ]
        return Curve(
            batch_size=curve.batch_size,
            context_length=curve.context_length,
            tokens=tokens,
            seconds=seconds,
        )

    def drafts(size: float) -> list[Curve]:
        return [curve_of(curve, size, None, curve.tokens[-1]) for curve in basis.draft_level]

    return Profile(
        source="scaled",
        date=basis.date,
        device=basis.device,
        target=target.name,
        draft=draft.name,
        target_parameters=target.parameters,
        draft_parameters=draft.parameters,
        dtype=dtype,
        tensor_parallel_size=basis.tensor_parallel_size,
        target_forward=[
            curve_of(curve, target_bytes, streamed, most) for curve in basis.target_forward
        ],
        draft_level=drafts(draft_bytes),
        draft_reading=(
            None if draft.head is None else drafts(draft_bytes + draft.reading_bytes(value_bytes))
        ),
        head=draft.head,
        overhead=basis.overhead,
        verification=basis.verification,
        target_shape=target,
        draft_shape=draft,
        streamed=streamed,
        provenance={"scaled_from": [[p.target, p.draft] for p in measured]},
    )


class _Passes:
    """Every measured forward pass, of targets and drafts, by bytes of weights."""

    def __init__(self, measured: Sequence[Profile]) -> None:
        found: list[tuple[float, Seconds]] = []
        for profile in measured:
            cost = CostModel(profile)
            found.append((_bytes(profile.target_parameters, profile), cost.target_seconds))
            found.append((_bytes(profile.draft_parameters, profile), cost.draft_seconds))
        found.sort(key=lambda entry: entry[0])
        self._sizes = [size for size, _ in found]
        self._timed = [seconds for _, seconds in found]

    def seconds(self, size: float, tokens: list[int], batch_size: int) -> Floats:
        """One pass of a model of ``size`` bytes; never faster than a smaller model's."""
        times = [np.asarray(seconds(tokens, batch_size)) for seconds in self._timed]
        times = list(np.maximum.accumulate(times))
        if size <= self._sizes[0]:
            return times[0]
        for (low, below), (high, above) in pairwise(zip(self._sizes, times, strict=True)):
            if low < size <= high:
                share = (size - low) / (high - low)
                return (1 - share) * below + share * above
        return times[-1] * (size / self._sizes[-1])


def _bytes(parameters: float, profile: Profile) -> float:
    return parameters * bytes_per_value(profile.dtype)
