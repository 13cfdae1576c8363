"""The tree library: trees by name, and the tree for a device and model pair.

Shipped trees lie in ``trees/`` (``sequoia_vllm/trees`` when installed), one
file per device type. Trees of the user's own, written by the tune command, lie
in `user_directory` and take precedence.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from sequoia_vllm.hardware.device import X86_CPU, Device, DeviceHints, identify, nearest
from sequoia_vllm.hardware.models import PairShapes
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.json_file import dump_json, read_model
from sequoia_vllm.library.computed import Basis, computed_entry
from sequoia_vllm.library.files import (
    AcceptanceFile,
    LibraryError,
    LibraryFile,
    TreeEntry,
    UserTree,
)
from sequoia_vllm.library.identity import KnownModels
from sequoia_vllm.library.learned import learned_acceptance
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.selection import (
    Request,
    Selection,
    differences,
    made_for,
    nearest_in_size,
    none_alike,
    of_strength,
    parameters_of,
    read_alike,
    runs_as_here,
    selection,
    timed_at_size,
    timed_here,
)
from sequoia_vllm.library.start_times import Runs, load_start_times
from sequoia_vllm.library.user_files import (
    Measurements,
    adaptation_path,
    files_in,
    is_there,
    make_writable,
    readable_directory,
    user_directory,
)
from sequoia_vllm.tree.token_tree import TokenTree


def shipped_directory() -> Path:
    """Where the shipped trees lie: inside the package, or beside it in a checkout.

    Raises:
        LibraryError: If they are in neither place.
    """
    package = Path(__file__).parents[1]
    for directory in (package / "trees", package.parent / "trees"):
        if (directory / "acceptance").is_dir():
            return directory
    raise LibraryError(
        f"the tree library is missing: neither {package / 'trees'} nor "
        f"{package.parent / 'trees'} is there; reinstall sequoia-vllm"
    )


class TreeLibrary:
    """Shipped and user trees.

    Raises:
        LibraryError, ProfileError, AcceptanceError: From any method, if a file it needs
            is corrupt; names the file and the field.
    """

    def __init__(self, shipped: Path | None = None, user: Path | None = None) -> None:
        """Reads nothing yet; None: the default directories."""
        self._shipped = shipped
        self._user = user

    @property
    def shipped(self) -> Path:
        """Directory of the shipped trees."""
        return self._shipped or shipped_directory()

    @property
    def user(self) -> Path:
        """Directory of the user's own trees.

        Raises:
            LibraryError: If this user has none.
        """
        return self._user or user_directory()

    @property
    def readable(self) -> Path | None:
        """`user`, or None: reading needs no such directory, nor one that can be looked into."""
        return self._user or readable_directory()

    def devices(self) -> list[str]:
        """Ids of the devices with shipped trees."""
        return sorted(path.stem for path in self.shipped.glob("*.json"))

    def file(self, device: str) -> LibraryFile:
        """The shipped trees of a device."""
        file = _read_library_file(self.shipped / f"{device}.json")
        if file.device != device:
            raise LibraryError(
                f"library file {self.shipped / f'{device}.json'} is of device {file.device!r}"
            )
        return file

    def entries(self) -> list[TreeEntry]:
        """Every tree: the user's own first, then the shipped ones by device."""
        user = [self._user_tree(path).entry for path in files_in(self.readable)]
        return user + [entry for device in self.devices() for entry in self.file(device).entries]

    def entry(self, name: str) -> TreeEntry:
        """The entry with this name.

        Raises:
            LibraryError: If there is none; lists the nearest names.
        """
        if name.startswith("user/"):
            path = self._user_file(name.removeprefix("user/"))
            if path is not None:
                return self._user_tree(path).entry
        device = name.split("/", 1)[0]
        if device in self.devices():
            for entry in self.file(device).entries:
                if entry.name == name:
                    return entry
        raise LibraryError(self._unknown_name(name))

    def load(self, name: str) -> TokenTree:
        """The tree with this name (``"h200/8b-1b/shipped"``, or ``"user/..."``).

        Raises:
            LibraryError: If there is none; lists the nearest names.
        """
        return self.entry(name).tree.tree

    # -- the user's own trees --------------------------------------------------

    def save_user_tree(self, pair: PairKey, entry: TreeEntry) -> Path:
        """Stores a tuned tree so that `select` prefers it from now on.

        Args:
            pair: What it is tuned for.
            entry: The tree; its name and what the key says are replaced by the key's.

        Returns:
            The file written.

        Raises:
            LibraryError: If it cannot be; names the fix.
        """
        own = entry.model_copy(
            update={
                "name": f"user/{pair.file_name}",
                "target": pair.target,
                "draft": pair.draft,
                "dtype": pair.dtype,
                "tensor_parallel_size": pair.tensor_parallel_size,
            }
        )
        tree = UserTree(device=pair.device, entry=own)
        make_writable(self.user)
        path = self.user / f"{pair.file_name}.json"
        path.write_text(dump_json(tree.to_dict()), encoding="utf-8")
        return path

    def measurements(self, pair: PairKey) -> Measurements:
        """Where the tune command keeps what it measured for this key.

        The files may not be there (`Measurements.exist`).

        Raises:
            LibraryError: If this user has no directory.
        """
        return Measurements(self.user / "measurements" / pair.file_name)

    def _user_file(self, name: str) -> Path | None:
        """The file of a user tree, if it is there."""
        path = None if self.readable is None else self.readable / f"{name}.json"
        return path if path is not None and is_there(path) else None

    def _user_tree(self, path: Path) -> UserTree:
        return read_model(path, UserTree, "user tree", LibraryError)

    # -- choosing --------------------------------------------------------------

    def select(
        self,
        pair: PairKey,
        *,
        shapes: PairShapes | None = None,
        target_parameters: float | None = None,
        draft_parameters: float | None = None,
        temperature: float | None = None,
        acceptance_class: str | None = None,
        batch_size: int = 1,
        hints: DeviceHints | None = None,
        runs: Runs | None = None,
    ) -> Selection:
        """The tree for this device, model pair and way of running.

        Looked for in this order: the user's own tree for exactly this device,
        pair, dtype, TP size and offloading; one computed here from what an engine of it timed
        when it started; a shipped tree of the device for the pair itself, or measured with
        models of its sizes; one computed here from the pair's shapes, on the device's datasheet
        or from what was measured with other models on it, for the acceptance that engines
        counted while they served this pair, if they did. Where shapes are not known: the
        shipped trees of the device, or of the one nearest to it by roofline, for the nearest
        model class. Of these the draft strength class asked for, or measured on the pair, or
        else the weakest. One line is logged, once for each different choice.

        A name is compared as it is; a directory by its files, not by its path.

        Args:
            pair: What the tree is for.
            shapes: What the models' configurations say; None: nothing is known of them.
            target_parameters: Parameters of the target; None: of its shape, or read off its
                name on the Hub.
            draft_parameters: Parameters of the draft, likewise.
            temperature: Usual sampling temperature, 0 for greedy; None: unknown.
            acceptance_class: Draft strength class; None: see above.
            batch_size: What the expectations in the result are for.
            hints: Values of a device that is not in the device table.
            runs: How the engine runs; None: what engines timed at their start is not looked at.

        Returns:
            The selection.

        Raises:
            DeviceError: If the device name is empty.
            LibraryError: If the class asked for is not there, or the library
                has no tree at all for this kind of device.
        """
        path, kept = self._user_file(pair.file_name), self.readable
        if path is not None:
            entry = self._user_tree(path).entry
            reason = f"tuned here ({path})"
            return selection(entry, "user", batch_size, [reason], is_timed=True)
        device = identify(pair.device)
        request = Request(pair, self._known_models(), acceptance_class, temperature)
        learned = None
        if kept is not None:
            learned = learned_acceptance(adaptation_path(kept, pair.file_name), pair)
        if kept is not None and shapes is not None and runs is not None:
            timed = load_start_times(kept, pair, shapes, runs)
            if timed is not None:
                name = device.id or "this-device"
                basis = Basis(name, None, [], self._vectors(), learned, own=timed[0])
                found, why = computed_entry(basis, shapes, request)
                if found is not None:
                    reasons = [f"timed when this pair started here ({timed[1]})", why]
                    source = found.profile.source
                    return selection(found, source, batch_size, reasons, is_timed=True)
        file, reasons = self._file_for(device, hints or DeviceHints())
        alike = read_alike(file.entries, pair)
        entries, why = made_for(alike, request)
        is_timed = timed_here(entries, pair, is_cpu=device.id == X86_CPU)
        if shapes is not None:
            # What was counted on the pair says more than times of models of its sizes.
            if not entries and learned is None:
                entries, why = timed_at_size(alike, shapes)
            if not any(runs_as_here(entry, file, device, pair, shapes) for entry in entries):
                basis = self._basis(file, device, learned)
                found, reason = computed_entry(basis, shapes, request)
                if found is not None:
                    on = [_identified(device)] if device.id else reasons
                    source = found.profile.source
                    return selection(found, source, batch_size, [*on, reason], is_timed=False)
                reasons.append(reason)
        if not entries:
            sizes = parameters_of(pair, shapes, target_parameters, draft_parameters)
            if not alike:
                raise none_alike(file.device, reasons[-1])
            entries, why = nearest_in_size(alike, pair, *sizes)
        reasons.append(why)
        entries, why = of_strength(entries, request)
        reasons.append(why)
        entry = min(entries, key=lambda e: abs(e.tensor_parallel_size - pair.tensor_parallel_size))
        reasons += differences(entry, pair)
        if device.mig:
            reasons.append("the slice is treated as the whole device")
        source = entry.profile.source
        return selection(entry, source, batch_size, reasons, is_timed=is_timed)

    def _known_models(self) -> KnownModels:
        paths = sorted((self.shipped / "profiles").glob("*.json"))
        return KnownModels.of(_read_profile(path) for path in paths)

    def _basis(
        self, file: LibraryFile, device: Device, learned: AcceptanceFile | None = None
    ) -> Basis:
        """What a pair's tree is computed from where this file's trees would be used."""
        names = sorted({entry.profile.file for entry in file.entries if entry.profile.file})
        paths = [self.shipped / name for name in names]
        return Basis(
            device=device.id or file.device,
            spec=device.spec or file.datasheet,
            measured=[_read_profile(path) for path in paths if path.is_file()],
            vectors=self._vectors(),
            learned=learned,
        )

    def _vectors(self) -> list[AcceptanceFile]:
        paths = sorted((self.shipped / "acceptance").glob("*.json"))
        return [AcceptanceFile.load(path) for path in paths]

    def _file_for(self, device: Device, hints: DeviceHints) -> tuple[LibraryFile, list[str]]:
        devices = self.devices()
        if device.id in devices:
            return self.file(device.id), [_identified(device)]
        files = [self.file(id_) for id_ in devices]
        specs = {file.device: file.datasheet for file in files if file.datasheet}
        if device.id == X86_CPU or not specs:
            raise LibraryError(
                f"the library has no trees for {device.name!r}: tune one "
                "(sequoia-vllm tune), or give a tree size: "
                '"tree": {"size": 8, "depth": 4}'
            )
        known = DeviceHints.of(device.spec) if device.spec else hints
        best, why = nearest(known, specs)
        return self.file(best), [f"no trees for device {device.name!r}: {why}"]

    def _unknown_name(self, name: str) -> str:
        import difflib

        names = [entry.name for entry in self.entries()]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        return f"no tree named {name!r} in the library{hint} (sequoia-vllm tree list shows all)"


def load(name: str) -> TokenTree:
    """`TreeLibrary.load` of the default library."""
    return TreeLibrary().load(name)


def select(pair: PairKey, shapes: PairShapes | None = None, runs: Runs | None = None) -> Selection:
    """`TreeLibrary.select` of the default library."""
    return TreeLibrary().select(pair, shapes=shapes, runs=runs)


def tuned_measurements(pair: PairKey) -> Measurements | None:
    """What the tune command measured for this key, or None if it did not."""
    library = TreeLibrary()
    found = None if library.readable is None else library.measurements(pair)
    return found if found is not None and found.exist() else None


def _identified(device: Device) -> str:
    mig = f", MIG slice {device.mig}" if device.mig else ""
    return f"device {device.name!r} is {device.id}{mig}"


def _read_library_file(path: Path) -> LibraryFile:
    return _read_cached(path, path.stat().st_mtime_ns if path.is_file() else 0)


@cache
def _read_cached(path: Path, _mtime: int) -> LibraryFile:
    return read_model(path, LibraryFile, "library", LibraryError)


def _read_profile(path: Path) -> Profile:
    return _read_profile_cached(path, path.stat().st_mtime_ns)


@cache
def _read_profile_cached(path: Path, _mtime: int) -> Profile:
    return Profile.load(path)
