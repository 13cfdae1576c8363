"""``python -m benchmarks.compiled``: prints what kernels take, and records it."""

import argparse
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import benchmarks.compiled
from benchmarks.compiled.compiling import Resources, compile_all
from benchmarks.compiled.pages import Page, line
from benchmarks.compiled.sources import source_hashes
from benchmarks.compiled.variant import CAPABILITIES
from benchmarks.compiled.variants import Task, all_tasks, sample_tasks


def main() -> None:
    """Prints the table, or records it."""
    parser = argparse.ArgumentParser(
        description=benchmarks.compiled.__doc__, prog="python -m benchmarks.compiled"
    )
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression for variants' names")
    parser.add_argument("--sample", action="store_true", help="each kernel once, as tests do")
    parser.add_argument(
        "--record", type=Path,
        help="folder whose page, named after Triton's version, gets the kernels that have changed",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="record all kernels again")
    arguments = parser.parse_args()
    if arguments.record is not None:
        _record(arguments.record, arguments.all, arguments.processes)
        return
    tasks = all_tasks(arguments.capabilities, arguments.only)
    if arguments.sample:
        tasks = sample_tasks()
    _compile_and_print(tasks, arguments.processes)


def _record(folder: Path, everything: bool, processes: int) -> None:
    """Compiles the kernels that have changed since the page was written, and writes it again."""
    page = Page.read(folder, importlib.metadata.version("triton"))
    sources = source_hashes()
    kernels = sources if everything else page.stale(sources)
    tasks = [task for task in all_tasks() if task[0].kernel.__name__ in kernels]
    table = page.replaced(_compile_and_print(tasks, processes))
    rows = tuple(table[variant.name, capability] for variant, capability in all_tasks())
    Page(page.triton_version, rows, sources).write(folder)


def _compile_and_print(tasks: Sequence[Task], processes: int) -> list[Resources]:
    table = []
    for row in compile_all(tasks, processes):
        print(line(row), flush=True)
        table.append(row)
    return table


if __name__ == "__main__":
    main()
