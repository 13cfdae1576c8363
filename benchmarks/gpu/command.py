"""Measures all there is to know of this project on a GPU, in half an hour or less.

Results are written after every number. The same command goes on where the last one ended.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.item_run import LOG, run_item
from benchmarks.gpu.items import ITEMS, MACHINE, Item, chosen_items, in_order
from benchmarks.gpu.results import FILE, GpuRunError, Results
from benchmarks.gpu.table import lines_of
from sequoia_vllm.measuring.interrupts import exit_code

WRONG, CANNOT = 1, 2  # exit codes
_CHECKOUT = Path(__file__).parents[2]
_LEAST_SECONDS = 30.0  # with less left nothing is begun


def main(arguments: Sequence[str] | None = None, start_method: str = "spawn") -> int:
    """Runs the command.

    Args:
        arguments: Command line; None: the process's own.
        start_method: How items' processes start (`multiprocessing`). With "spawn" none inherits
            anything of a GPU.

    Returns:
        Exit code: 0, 1 if something is wrong or failed, 2 if nothing can be measured, a signal's.
    """
    given = _parsed(arguments)
    try:
        if given.report is not None:
            if not given.report.exists():
                raise GpuRunError(f"--report {given.report}: there is no such file")
            results, items = Results(given.report), list(ITEMS)
        else:
            items = chosen_items(given.items)
            seconds = 60 * given.minutes
            results = run_items(items, given.output, given.tiny, seconds, start_method)
    except GpuRunError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT
    except KeyboardInterrupt as interrupt:
        _say("interrupted: the same command goes on with what is left")
        return exit_code(interrupt)
    print("\n".join(lines_of(results, items)))
    failed = [i.name for i in items if results.of(i.name).state not in ("done", None)]
    return WRONG if failed else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    names = ", ".join(item.name for item in ITEMS)
    parser.add_argument(
        "--items", help=f"what to measure, separated by commas, of {names} (all, in this order)"
    )
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("gpu-run"),
        help="folder for results, log and profiles (gpu-run); what it has is not measured again",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=30.0,
        help="end after so long; a measurement that would not fit is not begun (30)",
    )  # fmt: skip
    parser.add_argument(
        "--tiny", action="store_true",
        help="smallest sizes; with TRITON_INTERPRET=1 on a CPU, where times mean nothing",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, help=f"measure nothing: show this {FILE}")
    return parser.parse_args(arguments)


def run_items(
    items: Sequence[Item], folder: Path, tiny: bool, seconds: float, start_method: str
) -> Results:
    """Runs what is left of these items, one after the other."""
    deadline = time.monotonic() + seconds
    if not folder.parent.is_dir():
        raise GpuRunError(f"--output {folder}: there is no folder {folder.parent}")
    folder.mkdir(exist_ok=True)
    # Processes find this checkout whatever folder they start in.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    results = Results(folder / FILE)
    before = results.of(MACHINE.name).parts.get("machine")
    for item in [MACHINE, *in_order([i for i in items if i is not MACHINE], results)]:
        left = deadline - time.monotonic()
        if reason := item.reason_to_skip(tiny):
            results.add(item.name, skipped=reason)
            _say(f"{item.name}: skipped, {reason}")
        elif item is not MACHINE and left < max(_LEAST_SECONDS, 0 if tiny else 30 * item.minutes):
            _say(f"{item.name}: not begun, {left:.0f} s are left")
        else:
            results = _run_one(item, results, folder, tiny, left, start_method)
        if item is MACHINE:
            _check_machine(results, before)
    _write_profiles(results, folder)
    return results


def _run_one(
    item: Item, results: Results, folder: Path, tiny: bool, left: float, start_method: str
) -> Results:
    """Runs an item; the results with its own."""
    _say(f"--- {item.name}: {item.what} (about {item.minutes:g} min; {left / 60:.1f} left)")
    started = time.monotonic()
    results.add(item.name, begins=time.strftime("%Y-%m-%dT%H:%M:%S"))
    limit = left if tiny else min(left, 120 * item.minutes)
    state = run_item(item, folder, tiny, limit, start_method)
    results = Results(results.file)
    results.add(item.name, state=state, seconds=round(time.monotonic() - started, 1))
    found = results.of(item.name)
    _say(f"{item.name}: {state} after {found.seconds:.0f} s")
    for part, error in found.errors.items():
        _say(f"    {part}: {error}")
    return results


def _check_machine(results: Results, before: dict[str, object] | None) -> None:
    """Whether there is a GPU, the one that earlier results of the folder are of."""
    found = results.of(MACHINE.name)
    if found.errors or found.state != "done":
        raise GpuRunError(next(iter(found.errors.values()), f"see {results.file.parent / LOG}"))
    now = found.parts["machine"]
    for what in ("device", "commit"):
        if before is not None and before[what] != now[what]:
            raise GpuRunError(
                f"{results.file} is of {what} {before[what]}, this is {now[what]}: give another "
                "--output"
            )


def _write_profiles(results: Results, folder: Path) -> None:
    """Profiles for the tree library, of the pairs that were timed."""
    try:
        from benchmarks.gpu.profiles import profiles_of
    except ImportError:  # no pydantic: this is a bare machine, and no engine ran
        return
    for name, profile in profiles_of(results).items():
        profile.save(folder / f"profile-{name}.json")
        _say(f"profile written to {folder / f'profile-{name}.json'}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
