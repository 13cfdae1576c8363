"""The key that trees are chosen and tuned for, its models' sizes, and known pairs."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.drafters.registry import DrafterKind
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.hardware.streaming import StreamedWeights
from sequoia_vllm.installed import file_hash

# The hash of this one file says which weights a model directory has. An index of several files only
# names them, and is the same for every fine-tune.
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class PairKey:
    """A target and its draft on one device, as an engine looks their tree up."""

    device: str  # name that the driver gives ("NVIDIA H200"); of a CPU its model name, or "cpu"
    target: str
    draft: str
    dtype: str  # vLLM's, resolved: never "auto"
    tensor_parallel_size: int = 1
    offloading: str | None = None
    """One word for how much of the target lies outside the devices' memory, and how it is read;
    None: nothing does. Trees, times and learned acceptance are kept for each apart."""

    @property
    def file_name(self) -> str:
        """File name (without ``.json``) of the tree tuned for exactly this: readable, with a digest
        of the whole key. A model's directory is one model, however the path to it is written."""
        key = [
            self.device.strip(), model_key(self.target), model_key(self.draft), self.dtype,
            f"tp{self.tensor_parallel_size}",
        ]  # fmt: skip
        if self.offloading is not None:
            key.append(self.offloading)
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:8]
        return "--".join([*(_slug(part) for part in key), digest])


@dataclass(frozen=True)
class PairShapes:
    """Sizes of two models by their configurations, and where the target's weights lie."""

    target: ModelShape | None  # None: not to be had
    draft: ModelShape | None
    problem: str | None = None  # why one of them is None, or ``streamed`` is not known
    streamed: StreamedWeights | None = None
    """Weights of the target outside the devices' memory. None: there are none, or their number is
    not known (`PairKey.offloading` tells which)."""
    head: DrafterKind | None = None  # the kind of head that the draft is; None: it is a model

    @property
    def quantized(self) -> bool:
        """Whether either model's weights are."""
        shapes = self.target, self.draft
        return any(shape is not None and shape.is_quantized for shape in shapes)


def model_key(model: str) -> str:
    """Writes a model's name or directory in one form."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model.rstrip("/")


def is_local(model: str) -> bool:
    """Whether this is a path. How a path is spelled says nothing about the model."""
    return Path(model).is_dir() or model.startswith(("/", "./", "../", "~"))


def _slug(text: str) -> str:
    """Its last 40 characters, as they can stand in a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")[-40:].strip("-") or "x"


def weight_hashes(profiles: Iterable[Profile]) -> dict[str, Mapping[str, str]]:
    """SHA-256 by file of each model that these profiles were measured on, by its name there."""
    files: dict[str, Mapping[str, str]] = {}
    for profile in profiles:
        hashes = profile.provenance.get("models")
        for role, name in (("target", profile.target), ("draft", profile.draft)):
            found = hashes.get(role) if isinstance(hashes, Mapping) else None
            if isinstance(found, Mapping) and _WEIGHTS in found:
                files[name] = found
    return files


def is_same_model(stored: str | None, given: str, hashes: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether an engine's model is the one that the library calls ``stored``. Names must be equal;
    directories are compared by their files (`weight_hashes`)."""
    if not stored:
        return False
    if not is_local(given):
        return given.rstrip("/") == stored.rstrip("/")
    known = hashes.get(stored)
    if known is None or not Path(given).is_dir():
        return False
    # The configuration first, which is small and settles most cases.
    paths = {name: Path(given) / name for name in sorted(known)}
    return all(p.is_file() and file_hash(p) == known[name] for name, p in paths.items())
