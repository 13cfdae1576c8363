"""Tries the mutants of one room: `python -m tests.mutants.trying ROOM PART PARTS JOBS END FILE`.

The process imports the tests once and then forks for each mutant. The child gives the one function
that is changed its new code, and runs the tests that reach the changed lines, quickest first. No
file of the working tree is written.
"""

import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from collections import defaultdict
from functools import _lru_cache_wrapper
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import coverage
import pytest
from hypothesis import is_hypothesis_test, settings

from tests.mutants.making import Mutant, listed
from tests.mutants.rooms import ROOMS, ROOT, Room

SELECTED = "not engine and not slow and not upstream"
# A mutant that takes so much longer than its tests, or so much more memory, is found. Seconds are
# the processor's: the machine may be busy.
TIMES_LONGER, SECONDS_LONGER, MORE_MEMORY = 5, 5, 4 << 30
LONGEST_WAIT = 900  # by the clock
# The quickest tests of a line, in seconds together. Simulations that take longer are left out: what
# only they find counts as surviving, and a small test should find it.
MOST_SECONDS = 15.0
MOST_EXAMPLES = 40  # of a property: nearly all mistakes show in the first ones

KILLED, SURVIVED, FAILS, BROKEN = 1, 0, 3, 4  # exit codes


class Reach(NamedTuple):
    """What the tests do without mutants."""

    seconds: list[float]  # of each test
    tests: dict[tuple[str, int], list[int]]  # that reach a line of a file


class Trying:
    """A plugin of pytest, which runs mutants in place of the tests that were collected."""

    def __init__(self, room: Room, part: int, parts: int, jobs: int, end: float, out: Path) -> None:
        self._room, self._jobs, self._end, self._out = room, jobs, end, out
        mutants = list(listed(room.sources))
        self.all = len(mutants)
        random.Random(0).shuffle(mutants)  # consecutive parts are samples of the whole
        self._mutants = mutants[part % parts :: parts]
        self._folder = Path(tempfile.mkdtemp(prefix="sequoia-mutants-"))
        self._failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Fewer examples of properties, and the same ones for each mutant."""
        for item in items:
            test = getattr(item.obj, "__func__", item.obj)
            if is_hypothesis_test(test):
                own = test._hypothesis_internal_use_settings or settings.default
                test._hypothesis_internal_use_settings = settings(
                    own,
                    max_examples=min(own.max_examples, MOST_EXAMPLES),
                    derandomize=True,
                    database=None,
                )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes what fails."""
        if report.failed:
            self._failed.append(f"{report.nodeid}\n{report.longreprtext}")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Tries the mutants."""
        for file in self._room.sources:
            name = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            import_module(name.removesuffix(".__init__"))
        reach = self._measure(session.items)
        functions = functions_by_place({str(file) for file in self._room.sources})
        with self._out.open("w", encoding="utf-8") as out:
            out.write(json.dumps({"all": self.all, "chosen": len(self._mutants)}) + "\n")
            out.flush()
            running: dict[int, Mutant] = {}
            for mutant in self._mutants:
                if time.time() > self._end:
                    break
                while len(running) >= self._jobs:
                    self._note(out, running)
                if pid := self._start(mutant, session.items, reach, functions):
                    running[pid] = mutant
            while running:
                self._note(out, running)
        return True

    def _note(self, out: Any, running: dict[int, Mutant]) -> None:
        pid, status = os.waitpid(-1, 0)
        mutant = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == BROKEN:
            pytest.exit(f"could not try {mutant.function} {mutant.change()}", BROKEN)
        file = mutant.file.relative_to(ROOT / "sequoia_vllm").as_posix()
        found = {"file": file, "function": mutant.function, "survived": code == SURVIVED}
        out.write(json.dumps({**found, "change": mutant.change()}) + "\n")
        out.flush()

    def _start(self, mutant: Mutant, items: list[Any], reach: Reach, functions: Any) -> int | None:
        """The process that tries a mutant; None: the change does not make another program."""
        code = code_at(mutant)
        if code is None:
            return None
        tests = {i for line in mutant.lines for i in reach.tests.get((str(mutant.file), line), ())}
        if pid := os.fork():
            return pid
        try:
            self._begin_child()
            for one in caches():  # what the tests' imports computed has no mistake
                one.cache_clear()
            chosen = quickest(tests, reach.seconds)
            most = SECONDS_LONGER + TIMES_LONGER * sum(reach.seconds[i] for i in chosen)
            signal.setitimer(signal.ITIMER_PROF, most)
            signal.alarm(LONGEST_WAIT)
            for function in functions[code.co_qualname, code.co_firstlineno]:
                function.__code__ = code
            os._exit(self._run([items[i] for i in chosen]))
        except (KeyboardInterrupt, SystemExit, MemoryError, pytest.exit.Exception):
            os._exit(KILLED)
        except BaseException:
            traceback.print_exc()
            os._exit(BROKEN)

    def _begin_child(self) -> None:
        own = self._folder / str(os.getpid())
        own.mkdir()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = str(own)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)

    def _run(self, items: list[Any]) -> int:
        for item, following in zip(items, [*items[1:], None], strict=False):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return KILLED
        return SURVIVED

    def _measure(self, items: list[Any]) -> Reach:
        """Which tests reach which lines, found in a child: nothing has run in this process."""
        answer = self._folder / "reach.json"
        if not (pid := os.fork()):
            self._begin_child()
            files = [str(file) for file in self._room.sources]
            measured = coverage.Coverage(data_file=None, include=files, config_file=False)
            measured.start()
            seconds, kept = [], caches()
            for i, item in enumerate(items):
                for one in kept:  # else what one test reaches is hidden from the next
                    one.cache_clear()
                measured.switch_context(str(i))
                before = time.process_time()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                seconds.append(time.process_time() - before)
            measured.stop()
            if self._failed:
                print("These fail without mutants:", *self._failed, sep="\n")
                sys.stdout.flush()
                os._exit(FAILS)
            data = measured.get_data()
            lines = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
            answer.write_text(json.dumps([seconds, lines]), encoding="utf-8")
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            pytest.exit(f"tests failed without mutants ({code})", FAILS)
        seconds, lines = json.loads(answer.read_text(encoding="utf-8"))
        tests = {
            (file, int(line)): [int(test) for test in found if test]
            for file, by_line in lines.items()
            for line, found in by_line.items()
        }
        return Reach(seconds, tests)


def quickest(tests: set[int], seconds: list[float]) -> list[int]:
    """The tests in the order of their seconds, as many as take `MOST_SECONDS`; at least one."""
    ordered = sorted(tests, key=seconds.__getitem__)
    together = list(accumulate(seconds[test] for test in ordered))
    return ordered[: max(1, bisect_right(together, MOST_SECONDS))]


def caches() -> list[Any]:
    """What functions of the package and the tests keep of their calls."""
    found = [one for one in gc.get_objects() if type(one) is _lru_cache_wrapper]
    return [one for one in found if one.__module__.startswith(("sequoia_vllm.", "tests."))]


def functions_by_place(files: set[str]) -> dict[tuple[str, int], list[FunctionType]]:
    """The live functions of these files, by qualified name and first line."""
    found = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename in files:
            found[one.__code__.co_qualname, one.__code__.co_firstlineno].append(one)
    return found


def code_at(mutant: Mutant) -> CodeType | None:
    """The new code of the function that a mutant changes; None: nothing that can run changed."""
    try:
        mutated = compile(mutant.mutated(), str(mutant.file), "exec")
    except SyntaxError:
        return None
    places = [compile(mutant.source, str(mutant.file), "exec"), mutated]
    old, new = (_inside(code, mutant.function) for code in places)
    for before, after in zip(old, new, strict=True):
        if before != after:
            return after if len(before.co_freevars) == len(after.co_freevars) else None
    return None


def _inside(code: CodeType, name: str) -> list[CodeType]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [
        *(const for const in inner if const.co_qualname == name),
        *(found for const in inner for found in _inside(const, name)),
    ]


def main() -> int:
    """Runs pytest with the plugin."""
    name, part, parts, jobs, end, out = sys.argv[1:]
    room = next(room for room in ROOMS if room.name == name)
    os.chdir(ROOT)
    plugin = Trying(room, int(part), int(parts), int(jobs), float(end), Path(out))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist", "-m", SELECTED]
    return pytest.main([*options, *room.test_files], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main())
