"""The tree library: trees by file or name, and the tree for a device and model pair.

Shipped trees lie in ``trees/`` (``sequoia_vllm/trees`` when installed), one file per device type.
Trees of the user's own, written by `tune`, lie in `user_directory` and take precedence.
"""

import difflib
import os.path
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from sequoia_vllm.hardware.device import X86_CPU, Device, identify, nearest
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.json_file import check_model
from sequoia_vllm.json_input import expanded, read_json, shortened
from sequoia_vllm.library.files import (
    LIBRARY_SCHEMA,
    USER_TREE_SCHEMA,
    AcceptanceFile,
    LibraryError,
    LibraryFile,
    TreeEntry,
    UserTree,
)
from sequoia_vllm.library.pair_key import PairKey, PairShapes, is_same_model, weight_hashes
from sequoia_vllm.library.selection import (
    Selection,
    best_entry,
    choose_vector,
    computed_entry,
    nearest_in_size,
    runs_as_here,
    selection,
)
from sequoia_vllm.library.user_files import (
    TunedFiles,
    adaptation_path,
    files_in,
    is_there,
    learned_acceptance,
    make_writable,
    readable_directory,
    user_directory,
)
from sequoia_vllm.tree import Acceptance, AcceptanceError, TokenTree, TreeError

Content = TypeVar("Content")


def shipped_directory() -> Path:
    """Where the shipped trees lie: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    places = [package / "trees", package.parent / "trees"]
    if found := next((place for place in places if (place / "acceptance").is_dir()), None):
        return found
    neither = " nor ".join(map(str, places))
    raise LibraryError(
        f"the tree library is missing: neither {neither} is there; reinstall sequoia-vllm"
    )


class TreeLibrary:
    """Shipped and user trees, in these or the default directories.

    Raises:
        LibraryError, ProfileError, AcceptanceError: A file that a method reads cannot be used.
    """

    def __init__(self, shipped: Path | None = None, user: Path | None = None) -> None:
        self.shipped = shipped or shipped_directory()
        self.readable = user or readable_directory()  # None: this user has none

    @property
    def user(self) -> Path:
        """`readable`, to write to; refuses a user who has none, and names the fix."""
        return self.readable or user_directory()

    def devices(self) -> list[str]:
        """Ids of the devices with shipped trees."""
        return sorted(path.stem for path in self.shipped.glob("*.json"))

    def file(self, device: str) -> LibraryFile:
        """The shipped trees of a device."""
        file = _read_cached(self.shipped / f"{device}.json", LibraryFile.load)
        if file.device != device:
            raise LibraryError(
                f"library file {self.shipped / f'{device}.json'} is of device {file.device!r}"
            )
        return file

    def entries(self) -> list[TreeEntry]:
        """Every tree: the user's own first, then the shipped ones by device."""
        user = [UserTree.load(path).entry for path in files_in(self.readable)]
        return user + [entry for device in self.devices() for entry in self.file(device).entries]

    def entry(self, name: str) -> TreeEntry:
        """The entry with this name (``"h200/8b-1b/shipped"``, or ``"user/..."``).

        Raises:
            LibraryError: There is none; the message lists the nearest names.
        """
        device, _, rest = name.partition("/")
        own = self._own_tree(rest) if device == "user" else None
        if own is not None:
            return own[1]
        if device in self.devices():
            for entry in self.file(device).entries:
                if entry.name == name:
                    return entry
        names = [entry.name for entry in self.entries()]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise LibraryError(
            f"no tree named {name!r} in the library{hint} (names are DEVICE/CLASS/VECTOR; devices: "
            f"{', '.join(self.devices())})"
        )

    def _own_tree(self, name: str) -> tuple[Path, TreeEntry] | None:
        """The file of this name with a tree of the user's, and the tree, if it is there."""
        path = None if self.readable is None else self.readable / f"{name}.json"
        found = path is not None and is_there(path)
        return (path, UserTree.load(path).entry) if path is not None and found else None

    def save_user_tree(self, pair: PairKey, entry: TreeEntry) -> Path:
        """Stores a tree tuned by `measurements` so that `select` prefers it from now on.
        It refuses a directory that cannot be written to, and names the fix."""
        keys = ("target", "draft", "dtype", "tensor_parallel_size")
        file = str(self.measurements(pair).profile.relative_to(self.user))
        own = {"name": f"user/{pair.file_name}", **{key: getattr(pair, key) for key in keys}}
        own["profile"] = entry.profile.model_copy(update={"file": file})
        make_writable(self.user)
        path = self.user / f"{pair.file_name}.json"
        UserTree(device=pair.device, entry=entry.model_copy(update=own)).save(path)
        return path

    def measurements(self, pair: PairKey) -> TunedFiles:
        """Where `tune` keeps what it measured for this key; see `user` for errors."""
        directory = self.user / "measurements" / pair.file_name
        return TunedFiles(directory, directory / "acceptance.json", directory / "profile.json")

    def tuned(self, pair: PairKey) -> Selection | None:
        """The user's own tree for exactly this pair and way of running; None: there is none."""
        own = self._own_tree(pair.file_name)
        return own and selection(own[1], [f"tuned here ({own[0]})"])

    def select(self, pair: PairKey, shapes: PairShapes | None = None) -> Selection:
        """The tree for this device, model pair and way of running: the first that there is of those
        that docs/trees.md lists, from the tuned ones on.

        Trees are for the acceptance measured on the pair, or the weakest published one. A name is
        compared as it is; a directory by its files.

        Args:
            shapes: What the models' configurations say; None: nothing is known of them.

        Raises:
            DeviceError: The device name is empty.
            LibraryError: There is no tree.
        """
        if (own := self.tuned(pair)) is not None:
            return own
        kept = self.readable
        device = identify(pair.device)
        file, on = self._file_for(device)
        profiles = sorted((self.shipped / "profiles").glob("*.json"))
        hashes = weight_hashes(_read_cached(path, Profile.load) for path in profiles)

        def is_pair(target: str | None, draft: str | None) -> bool:
            return is_same_model(target, pair.target, hashes) and is_same_model(
                draft, pair.draft, hashes
            )

        # The best trees for streamed weights and for others differ by hundreds of nodes.
        is_resident = pair.offloading is None
        alike = [entry for entry in file.entries if (entry.streamed is None) == is_resident]
        entries = [entry for entry in alike if is_pair(entry.target, entry.draft)]
        why = [f"made for {entries[0].target} with {entries[0].draft}"] if entries else []
        spec = device.spec or file.datasheet
        if not entries and spec is None:
            raise LibraryError(
                f"the library has no trees for this pair on {file.device}, where nothing can be "
                "computed: tune one (sequoia-vllm tune)"
            )
        reasons = [on]
        if (
            spec is not None
            and shapes is not None
            and not any(runs_as_here(entry, file, device, pair, shapes) for entry in entries)
        ):
            learned = kept and learned_acceptance(adaptation_path(kept, pair.file_name), pair)
            vector, assumed = (
                (learned, f"acceptance {learned.description}")
                if learned
                else choose_vector(self._vectors(), is_pair)
            )
            try:
                found, how = computed_entry(device.id or file.device, spec, shapes, pair, vector)
            except LibraryError as error:
                reasons.append(str(error))
            else:
                return selection(found, [_identified(device) if device.id else on, how, assumed])
        if not alike:
            raise LibraryError(
                f"the library has no trees for offloaded targets on {file.device}, and none was "
                f"computed ({reasons[-1]}): give a tree size, such as "
                '"tree": {"size": 64, "depth": 10}'
            )
        if not entries:
            entries, nearest_why = nearest_in_size(alike, pair, shapes)
            why = [nearest_why]
        classes = {entry.acceptance_class for entry in entries}
        vectors = [vector for vector in self._vectors() if vector.name in classes]
        vector, assumed = choose_vector(vectors, is_pair)
        entry, differences = best_entry(entries, pair, vector)
        reasons += [*why, assumed, *differences]
        if device.mig:
            reasons.append("the slice is treated as the whole device")
        return selection(entry, reasons)

    def _vectors(self) -> list[AcceptanceFile]:
        paths = sorted((self.shipped / "acceptance").glob("*.json"))
        return [AcceptanceFile.load(path) for path in paths]

    def _file_for(self, device: Device) -> tuple[LibraryFile, str]:
        """The trees of this device, or of the nearest one, and why."""
        devices = self.devices()
        if device.id in devices:
            return self.file(device.id), _identified(device)
        files = [self.file(id_) for id_ in devices]
        specs = {file.device: file.datasheet for file in files if file.datasheet}
        if device.id == X86_CPU or not specs:
            raise LibraryError(
                f"the library has no trees for {device.name!r}: tune one "
                "(sequoia-vllm tune), or give a tree size: "
                '"tree": {"size": 8, "depth": 4}'
            )
        best, why = nearest(device.spec, specs)
        return self.file(best), f"no trees for device {device.name!r}: {why}"


def _identified(device: Device) -> str:
    mig = f", MIG slice {device.mig}" if device.mig else ""
    return f"device {device.name!r} is {device.id}{mig}"


def _read_cached(path: Path, read: Callable[[Path], Content]) -> Content:
    """What ``read`` makes of a file, read again only after the file has changed."""
    return _read_once(path, path.stat().st_mtime_ns if path.is_file() else 0, read)


@cache
def _read_once(path: Path, _mtime: int, read: Callable[[Path], Content]) -> Content:
    return read(path)


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
        TreeError, AcceptanceError: The file is not a tree file.
        LibraryError: No file and no entry has this name.
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
    """An acceptance vector by file, or by the name of one of the library; a file of it wins.

    Raises:
        AcceptanceError: There is none, or the file is not one.
    """
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
