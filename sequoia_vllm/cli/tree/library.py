"""``sequoia-vllm tree list`` and ``generate``: the library as a table, and as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from sequoia_vllm.hardware.device import identify
from sequoia_vllm.json_input import read_json
from sequoia_vllm.library.files import LIBRARY_SCHEMA, LibraryError, TreeEntry
from sequoia_vllm.library.tree_library import TreeLibrary

_BATCHES = (1, 8, 64)


def entries_of(library: TreeLibrary, device: str | None) -> list[TreeEntry]:
    """All entries, or those of one device.

    Raises:
        LibraryError: If the device has none; lists the devices that have.
        DeviceError: If the device name is empty.
    """
    entries = library.entries()
    if device is None:
        return entries
    wanted = identify(device).id
    entries = [entry for entry in entries if entry.name.split("/")[0] == wanted]
    if not entries:
        raise LibraryError(
            f"no trees for device {device!r}: there are trees for {', '.join(library.devices())}"
        )
    return entries


def entries_json(entries: list[TreeEntry]) -> list[dict[str, Any]]:
    """One object for each entry."""
    listed = []
    for entry in entries:
        estimates = entry.to_schedule().estimates
        listed.append(
            {
                "name": entry.name,
                "size": entry.tree.size,
                "depth": entry.tree.depth,
                "tensor_parallel_size": entry.tensor_parallel_size,
                "source": entry.profile.source,
                "expected_tokens": estimates[0].expected_tokens,
                "speedup": {str(e.batch_size): e.speedup for e in estimates},
            }
        )
    return listed


def entries_table(entries: list[TreeEntry]) -> Table:
    """One row for each entry, with its speedup at a few batch sizes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    for name in ("TP", "size", "depth", *(f"batch {batch}" for batch in _BATCHES), "times"):
        table.add_column(name, justify="right")
    for entry in entries:
        schedule = entry.to_schedule()
        speedups = [f"{schedule.estimate(batch).speedup:.2f}x" for batch in _BATCHES]
        table.add_row(
            entry.name, str(entry.tensor_parallel_size), str(entry.tree.size),
            str(entry.tree.depth), *speedups, entry.profile.source,
        )  # fmt: skip
    return table


def stale_files(files: dict[str, str], directory: Path) -> tuple[list[str], list[str]]:
    """Names of library files in ``directory`` that differ, and that should not be there.

    Only files that say they are of the library count as the latter: others are
    somebody's, and are not ours to remove.
    """
    changed = [
        name
        for name, text in files.items()
        if not (directory / name).is_file()
        or (directory / name).read_text(encoding="utf-8") != text
    ]
    others = (path for path in sorted(directory.glob("*.json")) if path.name not in files)
    return changed, [path.name for path in others if _is_library_file(path)]


def write_files(
    files: dict[str, str], directory: Path, changed: list[str], removed: list[str]
) -> None:
    """Brings the directory up to date."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in changed:
        (directory / name).write_text(files[name], encoding="utf-8")
    for name in removed:
        (directory / name).unlink()


def _is_library_file(path: Path) -> bool:
    data = read_json(path, "library", LibraryError)
    return isinstance(data, dict) and data.get("schema") == LIBRARY_SCHEMA
