"""What a tree is chosen and tuned for."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PairKey:
    """A target and its draft on one device, as an engine looks their tree up.

    Attributes:
        device: Name that the driver gives ("NVIDIA H200"); of a CPU its model
            name, or "cpu".
        target, draft: Model names or paths.
        dtype: vLLM's, resolved: never "auto".
        tensor_parallel_size: Devices the target is split over.
        offloading: How much of the target lies outside the devices' memory, and how it is
            read, in a word; None: nothing does. Trees, times and what was learned with weights
            read so are of no use without, nor the other way round.
    """

    device: str
    target: str
    draft: str
    dtype: str
    tensor_parallel_size: int = 1
    offloading: str | None = None

    @property
    def file_name(self) -> str:
        """File name (without ``.json``) of the tree tuned for exactly this.

        Readable, and followed by a digest of the whole key, since different paths
        may look alike once shortened. A model's directory is one model, however
        the path to it is written.
        """
        key = [
            self.device.strip(), model_key(self.target), model_key(self.draft), self.dtype,
            f"tp{self.tensor_parallel_size}",
        ]  # fmt: skip
        if self.offloading is not None:
            key.append(self.offloading)
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:8]
        return "--".join([*(_slug(part) for part in key), digest])


def model_key(model: str) -> str:
    """One writing of a model's name or directory."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model.rstrip("/")


def is_local(model: str) -> bool:
    """Whether this is a path: its spelling then says nothing of the model."""
    return Path(model).is_dir() or model.startswith(("/", "./", "../", "~"))


def _slug(text: str) -> str:
    """Its last 40 characters, as they can stand in a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")[-40:].strip("-") or "x"
