"""Docstrings begin with a noun or a verb, and log lines with our name."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sequoia_vllm"

# One must read the signature to learn what a docstring that begins so is about.
OPENERS = ("Of", "As", "That", "Those")
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")


def unclear(source: str) -> list[str]:
    """Names of functions and classes whose docstrings begin with one of `OPENERS`."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [
        node.name
        for node in nodes
        if (ast.get_docstring(node) or " ").partition("\n")[0].partition(" ")[0] in OPENERS
    ]


def test_openers_are_found():
    source = '''
class First:
    """Of one thing."""

    async def second(self):
        """
        Those of others.
        """

def third():
    """Offers nothing of that."""

def fourth():
    pass
'''
    assert unclear(source) == ["First", "second"]


def test_docstrings_begin_with_what_they_are_about():
    found = {
        file.relative_to(PACKAGE).as_posix(): names
        for file in PACKAGE.rglob("*.py")
        if (names := unclear(file.read_text(encoding="utf-8")))
    }
    assert found == {}


def unsigned(source: str) -> list[str]:
    """Calls of a logger whose lines do not begin with our name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    logged = [
        ast.unparse(call.args[call.func.attr == "log"])
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in LEVELS
        and ast.unparse(call.func.value).endswith("logger")
    ]
    return [line for line in logged if line[1:].partition(": ")[0] != "Sequoia"]


def test_log_lines_begin_with_our_name():
    """Users look for it, and bug reports carry what they find."""
    assert unsigned("logger.info('Sequoia: %s', 1); logger.log(2, 'no: %s', 1)") == ["'no: %s'"]
    found = {
        file.relative_to(PACKAGE).as_posix(): lines
        for file in PACKAGE.rglob("*.py")
        if (lines := unsigned(file.read_text(encoding="utf-8")))
    }
    assert found == {}
