"""What the cost model expected of the trees that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.report import Prediction
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library import tree_library
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.measuring.pair_to_measure import PairToMeasure
from sequoia_vllm.tree.token_tree import TokenTree

_ROOT = TokenTree((-1,))
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
        cls, profile: Profile, acceptances: Sequence[AcceptanceFile], context_length: int
    ) -> Basis:
        """From what was measured for this comparison."""
        return cls(profile, _HERE, [(vector, _HERE) for vector in acceptances], context_length)

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


def to_measure(settings: BenchSettings) -> PairToMeasure:
    """What predictions of a comparison are made from."""
    return PairToMeasure(
        engine=settings.engine,
        num_prompts=len(settings.prompts),
        max_tokens=settings.max_tokens,
        temperatures=settings.temperatures,
        batch_sizes=settings.batch_sizes,
        context_length=middle_context(settings.prompts, settings.max_tokens),
        most_nodes=1 + max(method.most_drafts for method in settings.methods),
    )


def middle_context(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Tokens of context in the middle of a mean completion."""
    return round(sum(map(len, prompts)) / len(prompts)) + max_tokens // 2
