"""What imports what: the packages of docs/architecture.md, the files, and the engine's rooms.

And what else holds for all files: names, log lines, lines.
"""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sequoia_vllm"
ENGINE = PACKAGE / "engine"
DOCUMENT = ROOT / "docs" / "architecture.md"

ROOMS = (
    "common", "compat", "core", "frontend", "hooks", "runner", "worker", "offload", "v1",
    "v2", "v2.attention", "v2.drafting", "v2.verification",
)  # fmt: skip


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in PACKAGE.rglob("*.py")}


def imported_by(file: Path) -> set[str]:
    """Modules of the package that a file imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = names & FILES.keys()
            found |= submodules
            if submodules != names:
                found.add(node.module)
    return found & FILES.keys() - {module_name(file)}


IMPORTS = {name: imported_by(file) for name, file in FILES.items()}


def test_files_do_not_import_in_circles():
    TopologicalSorter(IMPORTS).prepare()  # its error names the circle


def part_of(name: str) -> str | None:
    """The package or module right below `sequoia_vllm` that a dotted name lies in.

    What runs a kind of drafter on an engine is a part of its own.
    """
    parts = name.split(".")
    if parts[1:2] == ["drafters"] and parts[-1] in ("v1", "v2"):
        return "running_drafters"
    return parts[1] if parts[0] == "sequoia_vllm" and len(parts) > 1 else None


def imports() -> dict[str, set[str]]:
    """Imports of each package or module below `sequoia_vllm`: the others that it imports."""
    found: dict[str, set[str]] = {}
    for name, imported in IMPORTS.items():
        if part := part_of(name):
            found.setdefault(part, set()).update({part_of(other) or part for other in imported})
    return {part: used - {part} for part, used in found.items()}


def listed() -> list[tuple[str, set[str]]]:
    """Rows of the document's table, in its order."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)/?\]\([^)]*\) \| [^|]* \| ([^|]*) \|$", text, flags=re.MULTILINE)
    return [(part, set(re.findall(r"\w+", used))) for part, used in rows]


def test_all_that_is_imported_is_in_the_table():
    assert dict(listed()) == imports()


@pytest.mark.parametrize("place", range(len(listed())))
def test_no_arrow_goes_up(place):
    part, used = listed()[place]
    below = {name for name, _ in listed()[:place]}
    assert used <= below, f"{part} imports {sorted(used - below)}, which stand above it"


def test_what_stands_above_the_engine_imports_no_vllm():
    parts = [part for part, _ in listed()]
    core = set(parts[: parts.index("engine")])
    found = [
        name
        for name, file in FILES.items()
        if part_of(name) in core
        and re.search(r"^\s*(from|import) vllm\b", file.read_text(encoding="utf-8"), re.M)
    ]
    assert "step" in core
    assert found == []


def room_of(name: str) -> str | None:
    """The engine's room that a module lies in; None: it is not the engine's."""
    inside = name.removeprefix("sequoia_vllm.engine.")
    rooms = [room for room in ROOMS if f"{inside}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=None) if inside != name else None


def permitted(room: str) -> set[str]:
    """Rooms that a room may import, by its docstring."""
    text = (ENGINE / room.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    documentation = ast.get_docstring(ast.parse(text)) or ""
    found = re.search(r"^May import: ([\w., \n]+)\.$", documentation, flags=re.MULTILINE)
    assert found, f'{room}: its docstring has no line "May import: ROOM, ROOM." (or "none")'
    return set(re.findall(r"[\w.]+", found[1])) - {"none"}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_their_docstrings_permit(room):
    used = {
        room_of(other)
        for name, imported in IMPORTS.items()
        if room_of(name) == room
        for other in imported
    }
    not_permitted = used - {None, room} - permitted(room)
    assert not not_permitted, f"{room} imports {sorted(not_permitted)}: see its __init__.py"


def test_permitted_imports_are_of_rooms_and_without_circles():
    graph = {room: permitted(room) for room in ROOMS}
    assert set().union(*graph.values()) <= set(ROOMS)
    TopologicalSorter(graph).prepare()


# What chooses tokens: none of these is called by what adapts one of vLLM's runners.
CHOOSES = {
    "argmax", "argsort", "bernoulli", "cumprod", "exponential_", "log_softmax", "logsumexp",
    "multinomial", "normal_", "rand", "rand_like", "randint", "randn", "softmax",
    "topk", "tril", "tril_", "uniform_",
}  # fmt: skip
# A tree's shape. An adapter may hand it on, and ask where it lies.
SHAPES, ABOUT_MEMORY = {"ancestors", "children", "depths", "parents"}, {"device", "ndim", "shape"}


def own_logic(source: str) -> list[str]:
    """Where a file samples, verifies or walks trees by itself: by lines, in their order.

    That is a call of `CHOOSES`; an import of functions of probabilities; and every use of `SHAPES`
    but as an argument, a field or a result, to see whether there is one, or to cut it to a batch.
    """
    hands_on = ast.arguments | ast.arg | ast.keyword | ast.Assign | ast.AnnAssign | ast.Return
    tree, found = ast.parse(source), set()
    for node in ast.walk(tree):
        permitted = (
            isinstance(node, hands_on | ast.Tuple | ast.List | ast.Call)
            or (isinstance(node, ast.Attribute) and node.attr in ABOUT_MEMORY)
            or (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot))
            or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice))
        )
        names = {_name(child).lstrip("_") for child in ast.iter_child_nodes(node)}
        is_choice = isinstance(node, ast.Call) and _name(node.func) in CHOOSES
        if is_choice or (not permitted and names & SHAPES):
            found.add((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Import | ast.ImportFrom):
            text = ast.unparse(node)
            if re.search(r"torch\.(nn\.functional|distributions)|numpy\.random", text):
                found.add((node.lineno, text))
    return [text for _, text in sorted(found)]


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_what_is_logic_of_a_runner_is_found():
    planted = (
        "import torch.nn.functional as F", "probs = logits.softmax(-1)",
        "tokens = torch.multinomial(probs, 1)", "above = trees.parents[node]",
        "on_path = self._ancestors & real", "deepest = trees.depths.max()",
        "for child in children: pass",
    )  # fmt: skip
    assert len(own_logic("\n".join(planted))) == len(planted)
    handed_on = (
        "run(trees.parents, depth=trees.depths, on=ancestors.device); self.parents = parents"
    )
    assert own_logic(handed_on) == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room[0] == "v"])
def test_runners_have_no_logic_of_a_step(room):
    """It is in `step`, `verification`, `drafting`, `tree` and `kernels`."""
    files = {name: file for name, file in FILES.items() if room_of(name) == room}
    found = {name: own_logic(file.read_text(encoding="utf-8")) for name, file in files.items()}
    assert len(files) > 1
    assert not {name: lines for name, lines in found.items() if lines}
    assert "sequoia_vllm.reference_step" not in set().union(*(IMPORTS[name] for name in files))


def test_nothing_lies_loose_in_the_engine():
    assert [file.name for file in ENGINE.glob("*.py")] == ["__init__.py"]
    modules = [name for name in IMPORTS if name.startswith("sequoia_vllm.engine.")]
    assert [name for name in modules if room_of(name) is None] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_at_most_twenty_files(room):
    assert sum(room_of(name) == room for name in FILES) <= 20


def test_no_two_public_classes_share_a_name():
    """A runner's own variant says V1 or V2 in its name."""
    found: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert not twice


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


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_main_path_is_short(runner):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## The main path")[1].split("\n## ")[0]
    [listed] = re.findall(rf"- \*\*{runner}\*\*(.*?)(?=\n- |\Z)", section, flags=re.DOTALL)
    names = re.findall(r"`(\S+\.py)`", listed)
    files = [PACKAGE / name for name in names]
    told = (ROOT / "docs" / "one-step.md").read_text(encoding="utf-8")
    assert [name for name in names if f"sequoia_vllm/{name})" not in told] == []
    assert 14 <= len(files) <= 16
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert 2_500 <= lines <= 3_250


def test_tests_that_start_engines_say_so():
    """`make test-fast` leaves these out."""
    files = {file: file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")}
    starting = [
        file for file, text in files.items() if re.search(r"^ +with .*running\(", text, re.M)
    ]
    assert len(starting) > 20
    assert [str(file) for file in starting if "pytest.mark.engine" not in files[file]] == []


# Lines of Python in each room when its ceiling was last set. They may grow by `SLACK` until then.
# `python -m tests.unit.test_architecture` prints today's: set them with each release.
LINES = {
    "adaptation": 1_068, "attention": 436, "bench": 1_865, "benchmarks": 6_826, "calibration": 582,
    "cli": 2_589, "drafters": 1_580, "drafting": 1_425, "engine": 13_808, "examples": 1_947,
    "hardware": 2_713, "kernels": 5_436, "library": 1_004, "measuring": 812, "metrics": 486,
    "sequoia_vllm": 1_408, "step": 887, "tests": 51_700, "tree": 619, "verification": 1_385,
    "verifying": 513, "vocabulary": 376,
}  # fmt: skip
SLACK, MOST = 1.03, 101_800  # of a room; of all


def lines_by_room() -> dict[str, int]:
    """Lines of each package of ours, of the modules beside them, and of the other folders."""
    found: dict[str, int] = {}
    for folder in ("sequoia_vllm", "benchmarks", "tests", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT).parts
            room = folder if folder != "sequoia_vllm" or len(parts) == 2 else parts[1]
            found[room] = found.get(room, 0) + len(file.read_text("utf-8").splitlines())
    return dict(sorted(found.items()))


def test_no_room_outgrows_its_ceiling():
    found = lines_by_room()
    assert found.keys() == LINES.keys()
    over = {room: lines for room, lines in found.items() if lines > SLACK * LINES[room]}
    assert not over, f"{over}: delete what nobody needs, or set LINES anew and say why"
    assert sum(found.values()) <= MOST


if __name__ == "__main__":
    print(lines_by_room())
