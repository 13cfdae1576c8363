"""Acceptance and step times of a pair, as far as a comparison's predictions need them."""

from __future__ import annotations

from pathlib import Path

from sequoia_vllm.calibration.acceptance import (
    AcceptanceSettings,
    AcceptanceTask,
    measure_acceptance,
)
from sequoia_vllm.calibration.profiling import ProfileSettings, measure_profile
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.measuring.engines import Progress
from sequoia_vllm.measuring.pair_to_measure import PairToMeasure

# Largest tree that is timed, root included.
_LARGEST = 64
_TOKENS_TOTAL = 10_000


def measure_pair(
    pair: PairToMeasure, prompts: Path | None, raw_prompts: bool, progress: Progress
) -> tuple[Profile, list[AcceptanceFile]]:
    """Times of the pair, and its acceptance at each temperature.

    Args:
        pair: What to measure.
        prompts: File of its prompts; None: the built-in set.
        raw_prompts: Whether bare prompts are given without the chat template.
        progress: Called with (what is done, done, all).

    Raises:
        PromptError, CalibrationError: If something cannot be measured.
        KeyboardInterrupt: If it is interrupted.
    """
    vectors = [
        _acceptance(pair, prompts, raw_prompts, temperature, progress)
        for temperature in pair.temperatures
    ]
    return _profile(pair, prompts, progress), vectors


def _acceptance(
    pair: PairToMeasure,
    prompts: Path | None,
    raw_prompts: bool,
    temperature: float,
    progress: Progress,
) -> AcceptanceFile:
    how = AcceptanceSettings(
        pair.engine, prompts=prompts, num_prompts=pair.num_prompts, raw_prompts=raw_prompts,
        max_tokens=pair.max_tokens, temperature=temperature, max_tokens_total=_TOKENS_TOTAL,
    )  # fmt: skip
    measured = measure_acceptance(AcceptanceTask.prepare(how, "bench"), progress=progress)
    if measured.calibration is not None and not measured.calibration.complete:
        raise KeyboardInterrupt
    return measured


def _profile(pair: PairToMeasure, prompts: Path | None, progress: Progress) -> Profile:
    largest = min(_LARGEST, pair.most_nodes)
    ladder = [size for size in (1, 2, 4, 8, 16, 32) if size < largest]
    how = ProfileSettings(
        pair.engine, prompts=prompts, batch_sizes=pair.batch_sizes,
        tokens=(*ladder, max(4, largest)), contexts=(max(pair.context_length, 32),),
    )  # fmt: skip
    return measure_profile(how, progress)
