"""What the cost model expected of the trees that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.bench.report import Prediction
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.profile import Profile
from sequoia_vllm.tree import library
from sequoia_vllm.tree.library_files import AcceptanceFile
from sequoia_vllm.tree.token_tree import TokenTree

_ROOT = TokenTree((-1,))


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
    def tuned(
        cls, device: str, target: str, draft: str, dtype: str, context_length: int
    ) -> Basis | None:
        """From what ``sequoia-vllm tune`` measured for this pair; None: it did not.

        Raises:
            ProfileError, AcceptanceError: If a file cannot be read.
        """
        found = library.tuned_measurements(device, target, draft, dtype)
        return (
            None if found is None else cls.load(found.profile, [found.acceptance], context_length)
        )

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
