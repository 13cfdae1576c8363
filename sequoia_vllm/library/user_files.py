"""Where the user's own trees lie, what was measured, and what engines keep for their next start.

An engine may run where it cannot look or write. Its user may have no home or may not enter it, or
the disk is read-only. It then runs without such files.
"""

import datetime
import logging
import os
from pathlib import Path
from typing import NamedTuple

import platformdirs

from sequoia_vllm.adaptation.state import AdaptationState, StateError
from sequoia_vllm.library.files import AcceptanceFile, LibraryError
from sequoia_vllm.library.pair_key import PairKey

logger = logging.getLogger("vllm.sequoia.library")  # shown by vLLM's own handler

USER_DIRECTORY_VARIABLE = "SEQUOIA_VLLM_TREES"
_FIX = f"set {USER_DIRECTORY_VARIABLE} to a directory that can be written to"


def user_directory() -> Path:
    """Where the user's own trees lie: ``$SEQUOIA_VLLM_TREES``, or ``trees`` in the user's data
    directory of ``sequoia-vllm`` (``~/.local/share/sequoia-vllm/trees`` on Linux).

    Raises:
        LibraryError: Nobody knows where this user's home is; the message names the fix.
    """
    override = os.environ.get(USER_DIRECTORY_VARIABLE)
    try:
        if override:
            return Path(override).expanduser()
        data = Path(platformdirs.user_data_dir("sequoia-vllm", appauthor=False))
    except RuntimeError as error:
        raise LibraryError(f"this user has no home directory ({error}): {_FIX}") from error
    if not data.is_absolute():  # of older versions of platformdirs
        raise LibraryError(f"this user has no home directory: {_FIX}")
    return data / "trees"


def readable_directory() -> Path | None:
    """`user_directory`; None: this user has none. Whether files are in it: see `is_there`."""
    try:
        return user_directory()
    except LibraryError:
        return None


def adaptation_path(user: Path, name: str) -> Path:
    """What engines learned of a pair (`PairKey.file_name`) while they served it."""
    return user / "adaptation" / f"{name}.json"


def is_there(path: Path) -> bool:
    """Whether a file is there, as far as this user can see."""
    try:
        return path.is_file()
    except OSError:  # a directory that this user may not enter, or the like
        return False


def files_in(directory: Path | None) -> list[Path]:
    """The JSON files in a directory in order, as far as this user can see any."""
    try:
        return [] if directory is None else sorted(directory.glob("*.json"))
    except OSError:
        return []


def learned_acceptance(path: Path, pair: PairKey) -> AcceptanceFile | None:
    """Reads the file of a pair; None: there is no file, or too little was counted."""
    try:
        found = AdaptationState.load(path).usual_acceptance() if is_there(path) else None
    except (StateError, ValueError, LookupError, OSError) as error:
        logger.warning("Sequoia: what was learned while serving is not used: %s", error)
        return None
    if found is None:
        return None
    workload, acceptance = found
    return AcceptanceFile(
        name="learned",
        description=f"counted while serving {workload} requests ({path})",
        source="measured",
        date=datetime.date.fromtimestamp(path.stat().st_mtime),
        target=pair.target,
        draft=pair.draft,
        temperature=0.0 if workload == "greedy" else None,
        acceptance=acceptance.to_list(),
    )


class TunedFiles(NamedTuple):
    """The files that a user's own tree was made from."""

    directory: Path
    acceptance: Path  # `AcceptanceFile`: how often drafts are accepted
    profile: Path  # `Profile`: how long each part of a step takes


def reason_not_to_keep() -> str | None:
    """Why nothing can be kept in the user's directory, and the fix; None: files can be kept."""
    try:
        check_writable(user_directory())
    except LibraryError as error:
        return str(error)
    return None


def make_writable(directory: Path) -> None:
    """Makes a directory of the user's that is to be written to.

    Raises:
        LibraryError: It cannot be made, or written to; the message names the fix.
    """
    check_writable(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LibraryError(f"cannot make {directory}: {error.strerror}: {_FIX}") from error


def check_writable(directory: Path) -> None:
    """Checks that files can be made in a directory, or it can be made where there is none yet.

    Raises:
        LibraryError: Neither can be; the message names the fix.
    """
    nearest = directory
    try:
        while not nearest.exists():
            nearest = nearest.parent
    except OSError as error:
        raise LibraryError(f"cannot look into {directory} ({error.strerror}): {_FIX}") from error
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise LibraryError(f"cannot write to {directory}: {_FIX}")
