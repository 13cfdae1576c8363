"""Predicts the speedups of the measured trees with the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.bench.report import PredictedSpeed
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library import tree_library
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.tree.token_tree import TokenTree

_ROOT = TokenTree((-1,))


@dataclass(frozen=True)
class PredictionBasis:
    """Measurements that predictions are made from.

    Attributes:
        profile: Times of the pair on this machine.
        profile_name: Source of the times.
        acceptances: Vectors, each with its source; at most one per temperature.
        context_length: Context tokens in the middle of a completion.
    """

    profile: Profile
    profile_name: str
    acceptances: Sequence[tuple[AcceptanceFile, str]]
    context_length: int

    @classmethod
    def load(
        cls, profile: Path, acceptances: Sequence[Path], context_length: int
    ) -> PredictionBasis:
        """Reads files.

        Raises:
            ProfileError, AcceptanceError: If one cannot be read.
        """
        vectors = [(AcceptanceFile.load(path), str(path)) for path in acceptances]
        return cls(Profile.load(profile), str(profile), vectors, context_length)

    @classmethod
    def tuned(cls, pair: PairKey, context_length: int) -> PredictionBasis | None:
        """Reads what ``sequoia-vllm tune`` measured for this pair; None: nothing.

        Raises:
            ProfileError, AcceptanceError: If a file cannot be read.
        """
        found = tree_library.tuned_measurements(pair)
        if found is None:
            return None
        return cls.load(found.profile, [found.acceptance], context_length)

    def predict(
        self, tree: TokenTree | None, drafts: int, batch_size: int, temperature: float
    ) -> PredictedSpeed | None:
        """Predicts the speed with so many drafts; None: no vector for this temperature."""
        known = [entry for entry in self.acceptances if entry[0].temperature == temperature]
        if not known:
            return None
        vector, name = known[0]
        used = _ROOT if tree is None else tree.trim(drafts + 1)
        cost = CostModel(self.profile, self.context_length)
        estimate = cost.estimate(used, vector.vector, batch_size)
        return PredictedSpeed(
            speedup=estimate.speedup,
            tokens_per_step=estimate.expected_tokens,
            step_seconds=estimate.seconds,
            extrapolated=estimate.extrapolated,
            profile=self.profile_name,
            acceptance=name,
        )
