"""The mutants of a file: mutmut's operators, applied to what is inside functions.

mutmut's own runner leaves out properties and cached functions, half of `tree` and `drafting`. So
only its operators are used.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

# What tests on a CPU under Linux cannot tell. ``strict`` only finds mistakes made elsewhere. Warps,
# which interpreted kernels lack, change how fast a kernel is, not what it computes.
_UNTOLD = {"encoding", "num_warps", "strict"}
_LOGGING = {"logger", "warnings", "_log_once"}


@dataclass(frozen=True)
class Mutant:
    """One mistake: a source file with one place changed."""

    file: Path
    function: str  # the outermost function or method: "Class.name"
    lines: range  # of the statement that is changed
    source: str
    place: tuple[int, int]  # of what is replaced in the source, and by what
    text: str

    def mutated(self) -> str:
        """The whole file with the mistake."""
        start, end = self.place
        return self.source[:start] + self.text + self.source[end:]

    def change(self) -> tuple[str, ...]:
        """The lines that differ, without indentation: "-old", "+new"."""
        return changed_lines(self.source, self.mutated())


def changed_lines(before: str, after: str) -> tuple[str, ...]:
    """The lines that differ between two texts, without indentation: "-old", "+new"."""
    texts = ([line.strip() for line in text.splitlines()] for text in (before, after))
    found = list(difflib.unified_diff(*texts, n=0, lineterm=""))
    return tuple(line for line in found[2:] if not line.startswith("@@"))


def mutants_of(file: Path) -> list[Mutant]:
    """All mutants of a file, in its order."""
    source = file.read_text(encoding="utf-8")
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor(file, source, wrapper.module)
    wrapper.visit(visitor)
    return visitor.found


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: Path, source: str, module: cst.Module) -> None:
        super().__init__()
        self.found: list[Mutant] = []
        self._file, self._source, self._module = file, source, module
        lines = source.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, lines))]  # of each line
        self._names: list[str] = []  # of the classes and functions around
        self._functions = 0
        self._statements: list[range] = []
        self._untold = _UNTOLD | ({"device"} if "\nimport torch\n" in source else set())

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node, self._untold):
            return False
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            if not self._functions:
                self._names.append(node.name.value)
            self._functions += isinstance(node, cst.FunctionDef)
        if isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            self._statements.append(self._lines_of(node))
        if self._functions:
            self._mutate(node)
        return True

    def on_leave(self, node: cst.CSTNode) -> None:
        if isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            if _is_left_out(node, self._untold):
                return
            self._statements.pop()
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self._functions -= isinstance(node, cst.FunctionDef)
            if not self._functions:
                self._names.pop()

    def _lines_of(self, node: cst.CSTNode) -> range:
        """Lines of a statement; of a compound one its head."""
        place = self.get_metadata(PositionProvider, node)
        end = place.end.line
        if isinstance(body := getattr(node, "body", None), cst.BaseSuite):
            end = max(place.start.line, self.get_metadata(PositionProvider, body).start.line - 1)
        return range(place.start.line, end + 1)

    def _mutate(self, node: cst.CSTNode) -> None:
        for kind, operator in mutation_operators:
            if not isinstance(node, kind):
                continue
            for new in operator(node):
                if _tells(node, new, self._untold):
                    self.found.append(self._mutant(node, new))
                if isinstance(node, cst.BaseString):
                    break  # its other mutants are upper and lower case

    def _mutant(self, old: cst.CSTNode, new: cst.CSTNode) -> Mutant:
        place = self.get_metadata(PositionProvider, old)
        start, end = (self._starts[at.line - 1] + at.column for at in (place.start, place.end))
        if getattr(old, "lpar", ()):  # positions leave parentheses out
            new = new.with_changes(lpar=(), rpar=())
        text, name = self._module.code_for_node(new), ".".join(self._names)
        return Mutant(self._file, name, self._statements[-1], self._source, (start, end), text)


def _is_left_out(node: cst.CSTNode, untold: set[str]) -> bool:
    """Types, decorators, defaults of arguments, kernels, and texts of errors and logs.

    mutmut leaves out arguments of ``len`` and ``isinstance``: nearly all raise an error.
    """
    if isinstance(node, (cst.Annotation, cst.Decorator, cst.Param, cst.Raise)):
        return True
    if isinstance(node, cst.FunctionDef):  # Triton reads kernels' sources: they have no code
        return any("triton.jit" in cst.Module([]).code_for_node(each) for each in node.decorators)
    if isinstance(node, cst.Arg):
        return _is_untold(node, untold)
    if isinstance(node, cst.DictElement):
        return isinstance(node.key, cst.SimpleString) and node.key.evaluated_value == "num_warps"
    if not isinstance(node, cst.Call):
        return False
    called = node.func
    if isinstance(called, cst.Name):
        return called.value in {"len", "isinstance"} | _LOGGING
    return (
        isinstance(called, cst.Attribute)
        and isinstance(called.value, cst.Name)
        and called.value.value in _LOGGING
    )


def _is_untold(arg: cst.Arg, untold: set[str]) -> bool:
    """By its keyword; and a device of torch, of which tests have one, also without one."""
    if arg.keyword and arg.keyword.value in untold:
        return True
    value = arg.value.attr if isinstance(arg.value, cst.Attribute) else arg.value
    return "device" in untold and isinstance(value, cst.Name) and value.value == "device"


def _tells(old: cst.CSTNode, new: cst.CSTNode, untold: set[str]) -> bool:
    if not (isinstance(old, cst.Call) and isinstance(new, cst.Call)):
        return True
    kept = {id(arg) for arg in new.args}
    return not any(_is_untold(arg, untold) for arg in old.args if id(arg) not in kept)


def listed(sources: list[Path]) -> Iterator[Mutant]:
    """The mutants of several files."""
    for file in sources:
        yield from mutants_of(file)
