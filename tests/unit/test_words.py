"""Docstrings begin with a noun or a verb, log lines with our name; samples of output are true."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

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


@cache
def strings() -> set[str]:
    """All strings of the package, in lower case."""
    sources = (file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    found = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {text.lower() for text in found if isinstance(text, str)}


SAMPLES = [
    (page.name, block)
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.name != "architecture.md"  # a drawing
    for opening, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    if not opening
]


@pytest.mark.parametrize(("page", "sample"), SAMPLES)
def test_sample_output_has_the_words_and_columns_of_the_program(page, sample):
    known = {word for text in strings() for word in re.findall(r"[a-z]{3,}", text)}
    output = re.sub(r"^.* with .*, float32,", "", sample.lower())  # the pair
    assert set(re.findall(r"[a-z]{3,}", output)) - known == set()
    for heads in re.findall(r"^(?:T  )?batch  .*$", sample, re.M):
        assert set(re.split(r"  +", heads.strip().lower())) - strings() == set()
