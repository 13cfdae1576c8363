"""What the cost model expected of the trees that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.report import Prediction
from sequoia_vllm.calibration.acceptance import (
    AcceptanceSettings,
    AcceptanceTask,
    measure_acceptance,
)
from sequoia_vllm.calibration.profiling import ProfileSettings, measure_profile
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library import tree_library
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.measuring.engines import Progress
from sequoia_vllm.tree.token_tree import TokenTree

_ROOT = TokenTree((-1,))
# Largest tree that is timed for a prediction, root included.
_LARGEST = 64
_HERE = "measured by this command"


@dataclass(frozen=True)
class Basis:
    """What predictions are made from.

    Attributes:
        profile: Times of the pair on this machine.
        profile_name: Where they come from.
        acceptances: Vectors, each with where it comes from; at most one per temperature.
        context_length: Tokens of context in the middle of a completion.
    """

    profile: Profile
    profile_name: str
    acceptances: Sequence[tuple[AcceptanceFile, str]]
    context_length: int

    @classmethod
    def load(cls, profile: Path, acceptances: Sequence[Path], context_length: int) -> Basis:
        """From files.

        Raises:
            ProfileError, AcceptanceError: If one cannot be read.
        """
        vectors = [(AcceptanceFile.load(path), str(path)) for path in acceptances]
        return cls(Profile.load(profile), str(profile), vectors, context_length)

    @classmethod
    def tuned(cls, pair: PairKey, context_length: int) -> Basis | None:
        """From what ``sequoia-vllm tune`` measured for this pair; None: it did not.

        Raises:
            ProfileError, AcceptanceError: If a file cannot be read.
        """
        found = tree_library.tuned_measurements(pair)
        return (
            None if found is None else cls.load(found.profile, [found.acceptance], context_length)
        )

    @classmethod
    def measured(
        cls, settings: BenchSettings, prompts: Path | None, raw_prompts: bool, progress: Progress
    ) -> Basis:
        """From measurements made now: acceptance on the prompts that are compared, and times.

        Args:
            settings: What will be compared.
            prompts: File of its prompts; None: the built-in set.
            raw_prompts: Whether bare prompts are given without the chat template.
            progress: Called with (what is done, done, all).

        Raises:
            PromptError, CalibrationError: If something cannot be measured.
            KeyboardInterrupt: If it is interrupted.
        """
        context = middle_context(settings.prompts, settings.max_tokens)
        vectors = [
            (_acceptance(settings, prompts, raw_prompts, temperature, progress), _HERE)
            for temperature in settings.temperatures
        ]
        return cls(_profile(settings, prompts, context, progress), _HERE, vectors, context)

    def predict(
        self, tree: TokenTree | None, drafts: int, batch_size: int, temperature: float
    ) -> Prediction | None:
        """Of this many drafts of a tree; None: no acceptance at this temperature is known."""
        known = [entry for entry in self.acceptances if entry[0].temperature == temperature]
        if not known:
            return None
        vector, name = known[0]
        used = _ROOT if tree is None else tree.trim(drafts + 1)
        cost = CostModel(self.profile, self.context_length)
        estimate = cost.estimate(used, vector.vector, batch_size)
        return Prediction(
            speedup=estimate.speedup,
            tokens_per_step=estimate.expected_tokens,
            step_seconds=estimate.seconds,
            extrapolated=estimate.extrapolated,
            profile=self.profile_name,
            acceptance=name,
        )


def middle_context(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Tokens of context in the middle of a mean completion."""
    return round(sum(map(len, prompts)) / len(prompts)) + max_tokens // 2


def _acceptance(
    settings: BenchSettings,
    prompts: Path | None,
    raw_prompts: bool,
    temperature: float,
    progress: Progress,
) -> AcceptanceFile:
    how = AcceptanceSettings(
        settings.engine, prompts=prompts, num_prompts=len(settings.prompts),
        raw_prompts=raw_prompts, max_tokens=settings.max_tokens, temperature=temperature,
        max_tokens_total=10_000,
    )  # fmt: skip
    measured = measure_acceptance(AcceptanceTask.prepare(how, "bench"), progress=progress)
    if measured.calibration is not None and not measured.calibration.complete:
        raise KeyboardInterrupt
    return measured


def _profile(
    settings: BenchSettings, prompts: Path | None, context: int, progress: Progress
) -> Profile:
    largest = min(_LARGEST, 1 + max(method.most_drafts for method in settings.methods))
    ladder = [size for size in (1, 2, 4, 8, 16, 32) if size < largest]
    how = ProfileSettings(
        settings.engine, prompts=prompts, batch_sizes=settings.batch_sizes,
        tokens=(*ladder, max(4, largest)), contexts=(max(context, 32),),
    )  # fmt: skip
    return measure_profile(how, progress)
