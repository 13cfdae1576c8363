"""Tries mutants of the pure core and compares what survives with the list of equal ones."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.equal import LIST, Change, read_equal
from tests.mutants.rooms import ROOMS, ROOT, Room

MOST_UNREAD = 0.05


@dataclass
class Found:
    """What a room's run found."""

    all: int
    chosen: int
    killed: list[Change] = field(default_factory=list)
    survived: list[Change] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Mutants that were tried."""
        return len(self.killed) + len(self.survived)


def run_room(room: Room, given: argparse.Namespace, end: float) -> Found:
    """Tries a room's mutants in a process of its own; what it prints is shown if it fails."""
    with tempfile.TemporaryDirectory(prefix="sequoia-mutants-") as folder:
        out = Path(folder) / "found.jsonl"
        # Files that tests leave behind go with the folder.
        own = {"TMPDIR": folder, "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/hypothesis"}
        own |= {"TRITON_INTERPRET": "1"} if room.interpreted else {}
        arguments = room.name, given.seed, given.parts, given.jobs, end, out
        done = subprocess.run(
            [sys.executable, "-m", "tests.mutants.trying", *map(str, arguments)],
            cwd=ROOT, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode or not out.exists():
            sys.exit(f"{room.name}: mutants were not tried\n{done.stdout[-5000:]}")
        head, *rest = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    found = Found(**head)
    for one in rest:
        change = Change(one["file"], one["function"], tuple(one["change"]))
        (found.survived if one["survived"] else found.killed).append(change)
    return found


def judge(room: Room, found: Found, equal: dict[Change, str]) -> list[Change]:
    """Prints a room's row; returns what survived and is not listed."""
    unread = [change for change in found.survived if change not in equal]
    tried = max(found.tried, 1)
    print(
        f"| `{room.name}` | {found.tried:,} of {found.all:,} | {len(found.killed) / tried:.1%} "
        f"| {(len(found.survived) - len(unread)) / tried:.1%} | {len(unread) / tried:.1%} |",
        flush=True,
    )
    return unread


def stale(found: Found, equal: dict[Change, str]) -> list[Change]:
    """What is listed as equal though a test found it."""
    return [change for change in found.killed if change in equal.keys() - set(found.survived)]


def main() -> int:
    """Says 1 where more mutants survive unread than may."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help="tree, config, ...; none: all")
    parser.add_argument("--parts", type=int, default=1, help="try one of so many samples")
    parser.add_argument("--seed", type=int, default=0, help="which: the rest by PARTS")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    given = parser.parse_args()
    names = given.rooms or [room.name for room in ROOMS]
    rooms = [next(room for room in ROOMS if room.name == name) for name in names]
    first = given.seed % len(rooms)  # time that is short is so for another room each time
    equal, end = read_equal(LIST.read_text(encoding="utf-8")), time.time() + given.seconds
    print("| | tried | killed | equal | unread |\n|---|---|---|---|---|")
    unread, wrong = [], []
    for left, room in zip(range(len(rooms), 0, -1), rooms[first:] + rooms[:first], strict=True):
        now = time.time()
        found = run_room(room, given, now + (end - now) / left)
        survived = judge(room, found, equal)
        unread += survived
        if len(survived) > MOST_UNREAD * found.tried:
            wrong.append(f"{room.name}: more than {MOST_UNREAD:.0%} survive unread")
        if given.parts == 1:
            wrong += [f"listed as equal, but killed:\n{one}" for one in stale(found, equal)]
    print("", *unread, *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
