"""Mutants: one piece of a source file replaced within a block, also in what runs already.

`tests/mutants_by_hand.toml` has them, by kinds, with the checks that find them.
"""

import ast
import inspect
import linecache
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.memory_checks import MemoryCheckError

ROOT = Path(__file__).parents[2]
TABLE: dict[str, Any] = tomllib.loads((ROOT / "tests" / "mutants_by_hand.toml").read_text())


class Mutant(NamedTuple):
    """A row of the table."""

    place: str
    old: str
    new: str
    check: str

    @property
    def source(self) -> str:
        """The file as it is."""
        return (ROOT / "sequoia_vllm" / self.place).read_text(encoding="utf-8")

    @property
    def mutated(self) -> str:
        """The file with the mistake."""
        assert self.source.count(self.old) == 1, f"{self.source.count(self.old)} of {self.old!r}"
        return self.source.replace(self.old, self.new)

    def changed(self) -> ast.stmt:
        """The function that differs, in an otherwise empty class if it is a method."""
        before, after = _difference(ast.parse(self.source).body, ast.parse(self.mutated).body)
        if isinstance(after, ast.ClassDef):
            _, method = _difference(before.body, after.body)
            after.bases, after.decorator_list, after.body = [], [], [method]
        return after

    @contextmanager
    def applied(self, folder: Path) -> Iterator[None]:
        """Within the block the loaded package has the mistake; C++ is compiled from ``folder``."""
        if self.place.endswith(".cpp"):
            (folder / "mutant.cpp").write_text(self.mutated)
            with _compiled(folder / "mutant.cpp"):
                yield
            return
        changed, file = self.changed(), f"<mutant of {self.place}: {self.new}>"
        lines = self.mutated.splitlines(keepends=True)
        linecache.cache[file] = len(lines), None, lines, file  # where Triton finds its source
        module = import_module(f"sequoia_vllm.{self.place.removesuffix('.py').replace('/', '.')}")
        made: dict[str, Any] = {}
        exec(compile(ast.Module([changed], []), file, "exec"), vars(module), made)
        [(name, mutant)] = made.items()
        original = vars(module)[name]
        if isinstance(changed, ast.ClassDef):
            name = changed.body[0].name  # type: ignore[attr-defined]
            original, mutant = vars(original)[name], vars(mutant)[name]
        with _replaced(original, mutant):
            yield


def mutants(kind: str) -> dict[str, Mutant]:
    """The table's mutants of a kind, by their names."""
    return {name: Mutant(**row) for name, row in TABLE[kind].items()}


def _difference(before: list[Any], after: list[Any]) -> tuple[Any, Any]:
    pairs = zip(before, after, strict=True)
    [found] = [pair for pair in pairs if ast.dump(pair[0]) != ast.dump(pair[1])]
    return found


@contextmanager
def _replaced(original: Any, mutant: Any) -> Iterator[None]:
    """In place: whoever has the function runs the other's code, kernels and methods alike."""
    is_kernel = hasattr(original, "rewriter")  # an interpreted one
    if not is_kernel:
        original, mutant = _plain(original), _plain(mutant)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fn", "rewriter") if is_kernel else ("__code__",):
            patch.setattr(original, name, getattr(mutant, name))
        yield


def _plain(function: Any) -> Any:
    """The function within a property, a class's method or a cache."""
    for name in ("fget", "func", "__wrapped__"):
        function = getattr(function, name, function)
    assert inspect.isfunction(function)
    return function


@contextmanager
def _compiled(source: Path) -> Iterator[None]:
    from sequoia_vllm.attention import cpu_kernel

    cpu_kernel.load_kernels.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_kernel, "_SOURCE", source)
            yield
    finally:
        cpu_kernel.load_kernels.cache_clear()


# -- their checks ------------------------------------------------------------------------------


class _Outcomes:
    """How the tests of a run ended."""

    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[BaseException] = []

    def pytest_runtest_makereport(self, call: Any) -> None:
        if call.excinfo is not None:
            self.failures.append(call.excinfo.value)
        elif call.when == "call":
            self.passed += 1


def outcomes(*checks: str) -> _Outcomes:
    """Runs these tests in this process, until one fails."""
    found = _Outcomes()
    quiet = [f"-pno:{plugin}" for plugin in ("terminal", "cacheprovider", "xdist", "warnings")]
    options = ["-x", "-o", "addopts=", f"--rootdir={ROOT}", *quiet]
    pytest.main([*options, *(f"{ROOT}/tests/{check}" for check in checks)], [found])
    return found


def assert_caught(mutant: Mutant, folder: Path) -> None:
    """Its check finds something wrong, and does not just break."""
    with mutant.applied(folder):
        found = outcomes(mutant.check)
    assert found.failures, "it survives"
    [error] = found.failures
    assert isinstance(error, AssertionError | MemoryCheckError), repr(error)


def assert_all_pass(kind: str) -> None:
    """Each check passes without a mutant."""
    checks = dict.fromkeys(mutant.check for mutant in mutants(kind).values())
    found = outcomes(*checks)
    assert found.failures == []
    assert found.passed >= len(checks)


def assert_shown(mutant: Mutant, found: dict[str, Any], before: dict[str, Any]) -> None:
    """The check names what differs from before in an engine's answers.

    Those are ``tokens``, or what was ``drafted``, or how many were ``accepted`` at each depth.
    Whatever is drafted and accepted, tokens stay.
    """
    assert found[mutant.check] != before[mutant.check], "it survives"
    if mutant.check != "tokens":
        assert found["tokens"] == before["tokens"]
