"""The tool that tries mutants: what it changes, how a change takes effect, what is listed."""

import ast
import importlib.util
import sys

import pytest

pytest.importorskip("mutmut")
from tests.mutants.equal import LIST, Change, read_equal
from tests.mutants.making import mutants_of
from tests.mutants.rooms import PACKAGE, ROOMS
from tests.mutants.trying import code_at, functions_by_place

SOURCE = '''
"""A module."""
import logging
from functools import cached_property
from types import SimpleNamespace
import torch

logger = logging.getLogger("x")
OUTSIDE = 1 + 2
launch, device, triton = dict, (), SimpleNamespace(jit=lambda **_: str)


class Box:
    """A class."""

    @cached_property
    def size(self) -> int:
        """Its size."""
        return (3 +
                4)


def shifted(value: int, by: int = 1) -> int:
    if value < 0:
        raise ValueError(f"{value} is below {0 + 1}")
    logger.info("value %d", value + 1)
    launch(device, num_warps=4)
    launch(**{"num_warps": 8})
    return [one + by for one in (value,)][0]


@triton.jit(do_not_specialize=["value"])
def kernel(value):
    return value + 1
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    path = tmp_path / "mutated_example.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, found)
    spec.loader.exec_module(found)
    found.path = path
    return found


def test_what_is_inside_functions_is_changed_but_texts_types_hints_and_kernels(module):
    found = [(mutant.function, *mutant.change()) for mutant in mutants_of(module.path)]
    last = "-return [one + by for one in (value,)][0]"
    assert found == [
        ("Box.size", "-return (3 +", "-4)", "+return (3 - 4)"),
        ("Box.size", "-return (3 +", "+return (4 +"),
        ("Box.size", "-4)", "+5)"),
        ("shifted", "-if value < 0:", "+if value <= 0:"),
        ("shifted", "-if value < 0:", "+if value < 1:"),
        ("shifted", last, "+return [one - by for one in (value,)][0]"),
        ("shifted", last, "+return [one + by for one in (value,)][1]"),
    ]


def test_live_functions_and_properties_get_the_new_code(module):
    functions = functions_by_place({str(module.path)})
    results = []
    for mutant in mutants_of(module.path):
        code = code_at(mutant)
        [function] = functions[code.co_qualname, code.co_firstlineno]
        kept, function.__code__ = function.__code__, code
        try:
            results.append((module.Box().size, module.shifted(5)))
        except IndexError:
            results.append("error")
        function.__code__ = kept
    assert results == [(-1, 6), (8, 6), (8, 6), (7, 6), (7, 6), (7, 4), "error"]


def test_the_list_of_equal_mutants_is_read_and_each_has_a_reason():
    text = """@@ a.py f
-x < 0
+x <= 0
-x = 1
-y = 2
+x = 3
= Why.
@@ b.py C.g
-u
+v
= So.
"""
    assert read_equal(text) == {
        Change("a.py", "f", ("-x < 0", "+x <= 0")): "Why.",
        Change("a.py", "f", ("-x = 1", "-y = 2", "+x = 3")): "Why.",
        Change("b.py", "C.g", ("-u", "+v")): "So.",
    }
    for wrong in ("@@ a.py f\n-x\n+y\n", "@@ a.py f\n-x\n+y\n=\n"):
        with pytest.raises(ValueError, match=r"\S"):
            read_equal(wrong)


def functions(file: str) -> dict[str, str]:
    """Lines of each function and method, without indentation."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    tree = ast.parse(source)
    outer = [("", tree), *((f"{c.name}.", c) for c in tree.body if isinstance(c, ast.ClassDef))]
    return {
        prefix + node.name: [
            line.strip() for line in source.splitlines()[node.lineno - 1 : node.end_lineno]
        ]
        for prefix, owner in outer
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
    }


def test_listed_mutants_are_of_code_that_is_there():
    """Lines may move, but not change: then a mutant is read again."""
    gone = [
        change
        for change in read_equal(LIST.read_text(encoding="utf-8"))
        for line in change.lines
        if line[0] == "-" and line[1:] not in functions(change.file).get(change.function, ())
    ]
    assert not gone, "\n".join(map(str, gone))


def test_every_file_is_in_one_room_whose_tests_are_there():
    sources = [file for room in ROOMS for file in room.sources]
    assert len(set(sources)) == len(sources)
    assert all(file.is_file() for file in sources)
    root = PACKAGE.parent
    assert all((root / file).is_file() for room in ROOMS for file in room.test_files)
    for folder in ("tree", "verification", "drafting", "library", "hardware"):
        missing = {*(PACKAGE / folder).glob("*.py")} - {*sources}
        assert {file.name for file in missing} <= {"__init__.py"}
