"""What engines timed in their warm-up, for their next start: a profile in the user's directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sequoia_vllm.hardware.heads import HeadShape
from sequoia_vllm.hardware.models import PairShapes
from sequoia_vllm.hardware.step_profile import Profile, ProfileError
from sequoia_vllm.json_file import save_whole
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.user_files import is_there

logger = logging.getLogger("vllm.sequoia.library")  # shown by vLLM's own handler

Runs = Mapping[str, str | int | bool]
"""How engines run, as far as it changes times and a `PairKey` does not say it: versions, a CPU's
cores. JSON data."""


@dataclass(frozen=True)
class ToTime:
    """What an engine is to time when it starts.

    Attributes:
        pair: What the times are for.
        runs: How the engine runs.
        target_parameters, draft_parameters: Sizes of the models.
        head: What the draft is, if it is a head.
    """

    pair: PairKey
    runs: Runs
    target_parameters: float
    draft_parameters: float
    head: HeadShape | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {**asdict(self), "head": self.head and self.head.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ToTime:
        """What `to_dict` made."""
        head = data["head"] and HeadShape.model_validate(data["head"])
        return cls(**{**data, "pair": PairKey(**data["pair"]), "head": head})


def start_times_path(user: Path, pair: PairKey, runs: Runs) -> Path:
    """The file of this pair, in the directory of the user's trees; of a CPU by its cores."""
    cores = f"--{runs['cores']}-cores" if "cores" in runs else ""
    return user / "timed_at_start" / f"{pair.file_name}{cores}.json"


def load_start_times(
    user: Path, pair: PairKey, shapes: PairShapes, runs: Runs
) -> tuple[Profile, Path] | None:
    """What was timed when an engine of this pair started that ran like this, and its file.

    Args:
        user: Directory of the user's trees.
        pair: Device and models.
        shapes: Of the models: a directory may have others in it by now.
        runs: How the engine runs.

    Returns:
        None if nothing was. A file that cannot be used is named in a warning.
    """
    path = start_times_path(user, pair, runs)
    try:
        if not is_there(path):
            return None
        profile = Profile.load(path)
    except (ProfileError, OSError) as error:
        logger.warning("Sequoia: times of an earlier start are not used: %s", error)
        return None
    if shapes.target is None or shapes.draft is None:
        return None
    sizes = shapes.target.parameters, shapes.draft.parameters
    same_sizes = (profile.target_parameters, profile.draft_parameters) == sizes
    is_as_here = same_sizes and profile.provenance.get("runs") == dict(runs)
    return (profile, path) if is_as_here else None


def save_start_times(user: Path, timed: ToTime, profile: Profile) -> Path:
    """Writes the file, whole or not at all: engines may share one.

    Raises:
        OSError: If it cannot be written.
    """
    path = start_times_path(user, timed.pair, timed.runs)
    save_whole(path, profile)
    return path
