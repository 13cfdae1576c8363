"""Reading and writing safetensors checkpoints piece by piece."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sequoia_vllm.errors import SequoiaError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json",
    "chat_template*", "generation_config.json",
)  # fmt: skip
SHARD_BYTES = 1 << 30  # at most so much is in memory before it is written


class SyntheticTargetError(SequoiaError, ValueError):
    """A synthetic target that cannot be made as asked; the message names the fix."""


def find_checkpoint(model: str) -> Path:
    """Finds the folder of a model given by path or by name; downloads a name if need be."""
    folder = Path(model) if Path(model).is_dir() else _download(model)
    if not (folder / "config.json").is_file():
        raise SyntheticTargetError(
            f"{model}: there is no config.json; give the folder of a checkpoint"
        )
    if not any((folder / name).is_file() for name in (_INDEX, _SINGLE)):
        raise SyntheticTargetError(
            f"{model}: there is no {_SINGLE}; save the model in safetensors "
            "(transformers' save_pretrained does)"
        )
    return folder


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model"]))
    except (OSError, ValueError) as error:
        raise SyntheticTargetError(
            f"{model!r} is no folder, and cannot be had from the Hub: {error}"
        ) from error


class SourceCheckpoint:
    """Reads tensors of a safetensors checkpoint by name, when asked for."""

    def __init__(self, folder: Path) -> None:
        index = folder / _INDEX
        names = [_SINGLE]
        if index.is_file():
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        self._files = [folder / name for name in names]
        handles = [safe_open(path, framework="pt") for path in self._files]
        self._handles = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
        self._config = folder / "config.json"

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape; reads no data."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor in the dtype in which it is stored."""
        return self._handles[name].get_tensor(name)

    def sha256(self) -> str:
        """Hashes config.json and the weights; hexadecimal."""
        total = hashlib.sha256()
        for path in (self._config, *self._files):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()


def make_new(folder: Path) -> None:
    """Makes a folder, or takes an empty one."""
    if folder.is_dir() and any(folder.iterdir()):
        raise SyntheticTargetError(f"{folder} is not empty: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)


def copy_tokenizer(origin: Path, folder: Path) -> None:
    """Copies a model's tokenizer, chat template and generation config."""
    for pattern in _TOKENIZER_FILES:
        for path in origin.glob(pattern):
            shutil.copy(path, folder / path.name)


def write_checkpoint(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Writes tensors into one file, or into shards of about 1 GiB and their index."""
    places: dict[str, str] = {}  # file of each tensor
    pending: dict[str, torch.Tensor] = {}
    size = total = shards = 0
    for name, tensor in tensors:
        if size >= SHARD_BYTES:
            shards, size = shards + 1, 0
            save_file(pending, folder / f"model-{shards:05d}.safetensors", {"format": "pt"})
            pending.clear()
        pending[name] = tensor.contiguous()
        places[name] = f"model-{shards + 1:05d}.safetensors"
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if not shards:
        save_file(pending, folder / _SINGLE, {"format": "pt"})
        return
    save_file(pending, folder / f"model-{shards + 1:05d}.safetensors", {"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
