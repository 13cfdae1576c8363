"""When a model in an engine is one that the library knows, whatever its path is called."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.pair_key import PairKey, is_local

# The one file of a model directory whose hash says which weights it has: an index of several
# only names them, and is the same for every fine-tune.
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class KnownModels:
    """The models that inputs of the library were measured on.

    Attributes:
        files: SHA-256 by file, of each model with a directory of its own, by its name there.
    """

    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, profiles: Iterable[Profile]) -> KnownModels:
        """The models whose weights these profiles give a hash of."""
        files: dict[str, Mapping[str, str]] = {}
        for profile in profiles:
            hashes = profile.provenance.get("models")
            for role, name in (("target", profile.target), ("draft", profile.draft)):
                found = hashes.get(role) if isinstance(hashes, Mapping) else None
                if isinstance(found, Mapping) and _WEIGHTS in found:
                    files[name] = found
        return cls(files)

    def same(self, stored: str | None, given: str) -> bool:
        """Whether an engine's model is the one that the library calls ``stored``.

        A name is a name. A directory is told by its files, wherever it lies and whatever
        the path to it contains.
        """
        if not stored:
            return False
        if not is_local(given):
            return given.rstrip("/") == stored.rstrip("/")
        known = self.files.get(stored)
        if known is None or not Path(given).is_dir():
            return False
        # The configuration first, which is small and settles most cases.
        return all(_hash(Path(given) / name) == known[name] for name in sorted(known))

    def same_pair(self, target: str | None, draft: str | None, pair: PairKey) -> bool:
        """`same` of both models."""
        return self.same(target, pair.target) and self.same(draft, pair.draft)


def _hash(path: Path) -> str | None:
    if not path.is_file():
        return None
    stat = path.stat()
    return _hash_of(path, stat.st_mtime_ns, stat.st_size)


@cache
def _hash_of(path: Path, _mtime: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
