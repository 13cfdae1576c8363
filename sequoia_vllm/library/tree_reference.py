"""Reads a tree that a user names: a file, or a name in the library."""

import os.path
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.hardware.device import identify
from sequoia_vllm.json_file import check_model
from sequoia_vllm.json_input import expanded, read_json, shortened
from sequoia_vllm.library.files import (
    LIBRARY_SCHEMA,
    USER_TREE_SCHEMA,
    LibraryError,
    LibraryFile,
    TreeEntry,
    UserTree,
)
from sequoia_vllm.library.tree_library import TreeLibrary, shipped_directory
from sequoia_vllm.tree.acceptance import Acceptance, AcceptanceError
from sequoia_vllm.tree.token_tree import TokenTree, TreeError


@dataclass(frozen=True)
class NamedTree:
    """A tree that a user named."""

    title: str
    tree: TokenTree
    acceptance: Acceptance | None = None
    entry: TreeEntry | None = None


def is_tree_file(reference: str) -> bool:
    """Whether the user means a file: the text looks like a path, or there is such a file."""
    if reference.endswith(".json") or reference.startswith(("/", "~", "./", "../")):
        return True
    return os.path.isfile(reference)  # noqa: PTH113 (false for what no file can be called)


def find_tree(reference: str) -> NamedTree:
    """A tree by file or by library name; a file of that name wins.

    Raises:
        TreeError: If the file is not a tree file.
        LibraryError: If no file and no entry has this name.
    """
    if is_tree_file(reference):
        return _tree_in_file(expanded(reference))
    library, (device, _, rest) = TreeLibrary(), reference.partition("/")
    name = reference
    if rest and device.strip() and device not in library.devices():
        name = f"{identify(device).id or device}/{rest}"
    try:
        entry = library.entry(name)
    except OSError as error:
        raise LibraryError(f"no tree named {shortened(reference)}: {error.strerror}") from error
    except LibraryError:
        if os.path.isdir(reference):  # noqa: PTH112 (false for what no directory can be called)
            raise TreeError(f"{reference} is a directory: name a tree file in it") from None
        raise
    return NamedTree(entry.name, entry.tree, Acceptance.of(entry.acceptance), entry)


def find_vector(reference: str) -> Acceptance:
    """An acceptance vector by file, or by the name of one of the library; a file of it wins. Raises
    AcceptanceError if there is none, or the file is not one."""
    if is_tree_file(reference):
        return Acceptance.load(reference)
    folder = shipped_directory() / "acceptance"
    names = sorted(path.stem for path in folder.glob("*.json"))
    if reference not in names:
        raise AcceptanceError(
            f"no acceptance vector {shortened(reference)}: name a file, or one of "
            f"{', '.join(names)}"
        )
    return Acceptance.load(folder / f"{reference}.json")


def _tree_in_file(path: Path) -> NamedTree:
    """Reads the tree of a tree file, or of a file that the tune command wrote."""
    data = read_json(path, "tree", TreeError)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == LIBRARY_SCHEMA:
        file = check_model(data, LibraryFile, f"library file {path}", TreeError)
        raise TreeError(
            f"{path} is a library file with {len(file.entries)} trees: name one of them, like "
            f"{file.entries[0].name}"
        )
    if schema == USER_TREE_SCHEMA:
        entry = check_model(data, UserTree, f"tree file {path}", TreeError).entry
        return NamedTree(str(path), entry.tree, Acceptance.of(entry.acceptance), entry)
    try:
        tree = TokenTree.from_dict(data)
        vector = data.get("acceptance")
        return NamedTree(str(path), tree, None if vector is None else Acceptance.of(vector))
    except ValueError as error:
        raise type(error)(f"tree file {path}: {error}") from error
