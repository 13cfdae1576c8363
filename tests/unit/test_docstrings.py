"""Docstrings have one form: Google's sections, with names that are in the code.

Errors that a function raises stand in its section "Raises", and not within sentences.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sequoia_vllm"
IN_ORDER = ("Args", "Returns", "Raises")
IN_SENTENCES = {"adaptation/state.py"}  # files that still name errors in sentences

Documented = ast.Module | ast.ClassDef | ast.FunctionDef
FILES = {
    file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
    for file in PACKAGE.rglob("*.py")
}
OUR_CLASSES = {
    node.name for tree in FILES.values() for node in tree.body if isinstance(node, ast.ClassDef)
}


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a docstring, (name, text): first what precedes all sections, by the name ""."""
    first, *rest = re.split(r"^([A-Z][a-z]+):$\n", text, flags=re.MULTILINE)
    yield "", first
    yield from zip(rest[::2], rest[1::2], strict=True)


def entries(section: str) -> set[str]:
    """Names before the colons of a section's entries; several stand before one."""
    heads = re.findall(r"^ {4}(\S.*?)(?:: |:$|$)", section, flags=re.MULTILINE)
    return {name.strip("*") for head in heads for name in head.split(", ")}


def parameters(node: Documented) -> set[str]:
    """Parameters of a function; of a class those of `__init__`, or its fields."""
    if isinstance(node, ast.ClassDef):
        made = [child for child in node.body if getattr(child, "name", "") == "__init__"]
        return parameters(made[0]) if made else attributes(node)
    arguments = [each for each in ast.walk(node) if isinstance(each, ast.arguments)][:1]
    return {each.arg for args in arguments for each in ast.walk(args) if isinstance(each, ast.arg)}


def attributes(node: Documented) -> set[str]:
    """Fields of a class, and what its methods set."""
    targets = [child.target for child in ast.walk(node) if isinstance(child, ast.AnnAssign)]
    targets += [
        each for child in ast.walk(node) if isinstance(child, ast.Assign) for each in child.targets
    ]
    flat = [each for target in targets for each in getattr(target, "elts", [target])]
    return {getattr(each, "attr", getattr(each, "id", "")) for each in flat}


def known_classes(tree: ast.Module) -> set[str]:
    """Classes that a file may name: built in, of the package, or imported."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    return imported | OUR_CLASSES | vars(builtins).keys()


def faults(node: Documented, classes: set[str]) -> list[str]:
    """What is wrong with the form of a docstring."""
    parts = list(sections(ast.get_docstring(node) or ""))
    found, names = [], [name for name, _ in parts if name in IN_ORDER]
    if names != [name for name in IN_ORDER if name in names]:
        found.append(f"sections {names}: the order is {IN_ORDER}")
    for name, part in parts:
        bare = re.sub(r"(`+).*?\1", "", part, flags=re.DOTALL)
        if name != "Raises" and (raised := re.findall(r"\b[A-Z]\w*(?:Error|Exception)\b", bare)):
            found.append(f"{raised} outside a section 'Raises'")
        if said := re.search(r"^(?:Returns|Raises) `*(?:[A-Z]|int|float|bool)\w*", part, re.M):
            found.append(f"{said[0]!r} is no section")
        there_are = {"Args": parameters, "Attributes": attributes, "Raises": lambda _: classes}
        if name in there_are and (others := entries(part) - there_are[name](node)):
            found.append(f"{name}: there is no {', '.join(sorted(others))}")
    return [f"{getattr(node, 'name', 'the file')}: {fault}" for fault in found]


def test_docstrings_have_one_form():
    found = {
        file: wrong
        for file, tree in FILES.items()
        for classes in [known_classes(tree)]
        if (wrong := [
            fault for node in ast.walk(tree) if isinstance(node, Documented)
            for fault in faults(node, classes)
        ])
    }  # fmt: skip
    assert {file: wrong for file, wrong in found.items() if file not in IN_SENTENCES} == {}
    assert found.keys() >= IN_SENTENCES, "take what is mended from the list"


FAULTY = '''
def in_a_sentence(x):
    """Does it; ValueError: it cannot."""

def in_sentences(x):
    """Does it.

    Raises ``OSError`` if there is no file. It is a ValueError if it cannot.
    """

def of_names_that_are_not_there(x):
    """Does it.

    Raises:
        ValueErr: It cannot.

    Args:
        y: What to do.
    """

def good(x, *y):
    """Does it, unless ``ValueError`` says that it cannot.

    Args:
        x, y: What to do,
            in two lines.

    Raises:
        ValueError, OSError: It cannot.
    """
'''


def test_what_is_wrong_is_found():
    found = [faults(node, {"ValueError", "OSError"}) for node in ast.parse(FAULTY).body]
    assert [len(each) for each in found] == [1, 2, 3, 0], found
