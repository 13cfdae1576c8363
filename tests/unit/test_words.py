"""Docstrings begin with a noun or a verb, and log lines with our name."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sequoia_vllm"

LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")


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
