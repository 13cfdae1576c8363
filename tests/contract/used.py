"""Finds what our engine replaces, calls and reads of vLLM, by reading both packages' sources.

    python -m tests.contract.used

writes it to `ledger.json`, which the start-up contract reads. Run it where a supported vLLM is
installed; it is not imported. A test compares.

Names that a module imports from vLLM, and what our subclasses override and call, are followed.
What a variable holds is not known: `watched.json` names the classes whose instances vLLM hands
us. Of those everything counts that any module of the place reads under such a name.
"""

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from sequoia_vllm.engine.compat.ledger import LEDGER
from sequoia_vllm.engine.compat.sources import Definition, NotFoundError, Sources, bindings
from sequoia_vllm.engine.compat.versions import CHANGED

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "sequoia_vllm"
ENGINE = PACKAGE / "engine"
# The engine's, and those that run each kind of drafter.
MODULES = sorted([*ENGINE.rglob("*.py"), *PACKAGE.glob("drafters/*/v[12].py")])

GPU_FILES = (
    "v2/attention/attention_gpu", "v2/attention/backend_gpu",
    "v2/attention/mamba_", "v2/attention/mixed_", "v2/attention/recurrent_",
    "v2/attention/sparse_", "v2/attention/target_graphs",
    "v2/graph_times", "v2/runner_gpu", "worker/worker_gpu",
)  # fmt: skip
CPU_FILES = ("v1/", "offload/", "runner/cpu_attention", "v2/runner_cpu", "v2/attention/backend_cpu",
    "worker/worker_cpu")  # fmt: skip
# By place: "watched" classes; names that are called otherwise, or by what vLLM hands us ("in_full":
# with all of their parameters; "up_to" the last that we give, of which newer versions have more).
# Among them `process_weights_after_loading`: where a layer has `_cpu_skip_gemm_dispatch`, it does
# not pack weights into memory that only oneDNN knows. And metadata of attention: rows after the
# trees get their own, whose fields about requests are cut.
HANDED = json.loads(Path(__file__).with_name("watched.json").read_text(encoding="utf-8"))

# What becomes of an attribute of vLLM's, by our function that takes it and its name.
_HOW = {
    "_wrap": "patch", "patched": "swap", "patch_for_good": "swap", "setattr": "added field",
}  # fmt: skip

Calls = list[ast.Call]


def path_of(found: Definition) -> str:
    """``module:attribute[.attribute]``."""
    return f"{found.module}:{found.name.removeprefix(found.module).lstrip('.')}"


class Module:
    """One of our engine's modules.

    Attributes:
        imported: What its names from vLLM stand for: ``module[.attribute]``.
        chains: Attribute chains that begin with one of these, and their calls.
        attributes: All other attributes by name, and their calls.
    """

    def __init__(self, file: Path) -> None:
        self.path = file
        self.file = str(file.relative_to(ENGINE if ENGINE in file.parents else PACKAGE))
        name = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        self.name = name.removesuffix(".__init__")
        self.lines = file.read_text(encoding="utf-8").splitlines()
        self.tree = without_annotations(ast.parse("\n".join(self.lines)))
        self.imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        }
        self.chains: dict[tuple[str, ...], Calls] = {}
        self.attributes: dict[str, Calls] = {}
        calls = {node.func: node for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute):
                chain = tuple(ast.unparse(node).split("."))
                call = [calls[node]] if node in calls else []
                if chain[0] in self.imported:
                    self.chains.setdefault(chain, []).extend(call)
                elif isinstance(node, ast.Attribute):
                    self.attributes.setdefault(chain[-1], []).extend(call)

    @property
    def place(self) -> str:
        if self.file.startswith(GPU_FILES):
            return "gpu"
        if self.file.startswith(CPU_FILES) or self.file.endswith("/v1.py"):
            return "cpu_v1"
        return "v2" if self.file.startswith("v2/") or self.file.endswith("/v2.py") else "everywhere"

    @property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]

    def until(self, *nodes: Any) -> str:
        """The nearest comment "Until: ...", above one of these nodes or in the room's docstring."""
        for node in nodes:
            line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
            comment: list[str] = []
            while line and (text := self.lines[line - 1].strip()).startswith("#"):
                comment.insert(0, text.lstrip("# "))
                line -= 1
            if found := re.search(r"Until: (.*)", " ".join(comment)):
                return found[1].rstrip(".")
        room = self.path.with_name("__init__.py").read_text()
        found = re.search(r"^Until: (.*?)\.\n\n", room, flags=re.DOTALL | re.MULTILINE)
        return found[1].replace("\n", " ") if found else ""


class Use:
    """What the engine uses of the vLLM package in a directory."""

    def __init__(self, vllm: Path) -> None:
        self.sources = Sources(vllm, REPOSITORY)
        self.modules = [Module(file) for file in MODULES]
        self.replaced: dict[str, dict[str, str]] = {}
        self.places: dict[str, dict[str, str | None]] = {
            place: {} for place in ("everywhere", "cpu_v1", "v2", "gpu")
        }
        self.set_by_us = {
            path[0]
            for module in self.modules
            for node in module.classes
            if any(one.module.startswith("vllm.") for one in self._bases_of(module, node))
            for path in _assigned(node)
            if len(path) == 1
        }
        for module in self.modules:
            self._add_imported(module)
            self._add_patches(module)
            for node in module.classes:
                self._add_class(module, node)
        for place, classes in HANDED["watched"].items():
            for path in classes:
                self._add_watched(place, path)
        for place, paths in HANDED["in_full"].items():
            for path in paths:
                self._add(place, path, self._parameters(self.sources.find(path)))
        for path, last in HANDED["up_to"].items():
            names, _, _ = str(self._parameters(self.sources.find(path))).partition(f" {last},")
            self._add("gpu", path, f"{names} {last}, ...")

    def to_dict(self) -> dict[str, Any]:
        """As in the file: what holds everywhere is not said again."""
        everywhere = self.places["everywhere"]
        for place, found in self.places.items():
            others = () if place == "everywhere" else everywhere
            if place == "gpu":
                others = {**everywhere, **self.places["v2"]}
            self.places[place] = {path: found[path] for path in sorted(found) if path not in others}
        return {**self.places, "replaced": dict(sorted(self.replaced.items()))}

    # -- what is called and read -------------------------------------------------------------

    def _add(self, place: str, path: str, parameters: str | None = None) -> None:
        """An entry, or more of it: parameters in full win over some, and some over none."""
        module = path.partition(":")[0]
        place = "cpu_v1" if "cpu" in module and place == "everywhere" else place
        found = self.places[place]
        known = [one for one in (found.get(path), parameters) if one is not None]
        exact = [one for one in known if "..." not in one]
        found[path] = exact[0] if exact else max(known, key=len, default=None)

    def _add_imported(self, module: Module) -> None:
        for (first, *attributes), calls in module.chains.items():
            try:
                found = self._follow(module.imported[first], attributes)
            except NotFoundError:
                continue
            if ":" in (path := path_of(found)).rstrip(":"):
                self._add(module.place, path, self._called(found, calls))

    def _follow(self, name: str, attributes: list[str]) -> Definition:
        """As far as classes and functions go; of what only running the code tells, its owner."""
        module, _, last = name.rpartition(".")
        try:
            found = self.sources.find(f"{module}:{last}")
        except NotFoundError:
            found = Definition(name, name)
            if self.sources._file(name) is None:
                raise
        for attribute in attributes:
            try:
                found = self.sources._attribute(found, attribute)
            except NotFoundError:
                break
        if found.name == found.module or not found.name.startswith("vllm."):
            raise NotFoundError(found.name)
        return found

    def _parameters(self, found: Definition) -> str | None:
        """All of a callable's; None: it has none, or other versions have others."""
        try:
            if path_of(found) in {changed.path for changed in CHANGED}:
                return None
            return ", ".join(self.sources.signature(found).names)
        except NotFoundError:
            return None

    def _called(self, found: Definition, calls: Calls, bound: int = 0) -> str | None:
        """Parameters up to the last that these calls give; None: nothing calls it so."""
        known = self._parameters(found)
        if known is None or not calls:
            return None
        names, last = known.split(", ") if known else [], bound
        for call in calls:
            given = [one for one in call.args if not isinstance(one, ast.Starred)]
            keywords = [one.arg for one in call.keywords if one.arg in names]
            last = max([last, bound + len(given), *(names.index(one) + 1 for one in keywords)])
        if self.sources.signature(found).required - set(names[:last]):
            return None  # something else has such a name
        return ", ".join([*names[:last], "..."])

    def _add_watched(self, place: str, path: str) -> None:
        places = {"everywhere": tuple(self.places), "v2": ("v2", "gpu")}.get(place, (place,))
        modules = [one for one in self.modules if one.place in places]
        owner = self.sources.find(path)
        has = {
            name
            for base in self.sources._bases(owner)
            for name in (*_defined(base), *base.fields)
            if not name.startswith("__")  # as what Python itself calls
        }
        for name in sorted(has & {name for one in modules for name in one.attributes}):
            found = self.sources._attribute(owner, name)
            calls = [call for one in modules for call in one.attributes.get(name, ())]
            known = self._parameters(found)
            fits = known is not None and all(
                len(call.args) < len(known.split(", "))
                and {one.arg for one in call.keywords} <= {None, *known.split(", ")}
                for call in calls
            )
            called = self._called(found, calls, bound=1) if fits else None
            self._add(place, f"{path}.{name}", called)

    # -- what is replaced --------------------------------------------------------------------

    def _replace(self, module: Module, path: str, how: str, *nodes: Any) -> None:
        self.replaced[path] = {"how": how, "in": module.file, "until": module.until(*nodes)}

    def _add_patches(self, module: Module) -> None:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or len(node.args) < 2:
                continue
            called, (owner, name, *_) = ast.unparse(node.func), node.args
            how = _HOW.get(called)
            if how is None or not isinstance(owner, ast.Name) or owner.id not in module.imported:
                continue
            at = module.imported[owner.id]
            if how == "added field":
                field = self.sources._names(module.name)[ast.unparse(name)]
                at = path_of(self._follow(at, []))
                self._replace(module, f"{at}.{ast.literal_eval(field)}", how, node)
                continue
            name = ast.literal_eval(name)
            module_name, _, owner_name = at.rpartition(".")
            path = f"{at}:{name}" if how == "swap" else f"{module_name}:{owner_name}.{name}"
            self._replace(module, path, how, node)
            try:
                self._add(module.place, path, self._parameters(self.sources.find(path)))
            except NotFoundError:
                continue  # another version has it

    def _bases_of(self, module: Module, node: ast.ClassDef) -> list[Definition]:
        """A class and its bases, in the order of Python's attribute look-up."""
        found = list(self.sources._bases(self.sources.find(f"{module.name}:{node.name}")))
        return [one for place, one in enumerate(found) if one not in found[place + 1 :]]

    def _add_class(self, module: Module, node: ast.ClassDef) -> None:
        bases = self._bases_of(module, node)
        vllms = [one for one in bases if one.module.startswith("vllm.")]
        ours = [one for one in bases if one.module.startswith("sequoia_vllm.")]
        if not vllms:
            return
        own = {name for one in ours for name in _defined(one)}
        if constructor := self._parameters(vllms[0]):
            self._add(module.place, path_of(vllms[0]), f"{constructor}, ...")
        for one in ours:
            where = next(other for other in self.modules if other.name == one.module)
            for name, place in _defined(one).items():
                if path := _defined_at(vllms, name):
                    self._replace(where, path, "subclass", place, one.node)
                    self._add(where.place, path, self._parameters(self.sources.find(path)))
            self._add_set(where, one, vllms)
            self._add_called(where, one, vllms, own)

    def _add_set(self, module: Module, ours: Definition, vllms: list[Definition]) -> None:
        """Attributes of its own that it replaces, or of what it has of vLLM's."""
        for path, place in _assigned(ours.node).items():
            owners = [base for base in vllms if path[:1] in _assigned(base.node)]
            is_ours = len(path) > 1 and path[-1] in self.set_by_us
            if owners and not is_ours:
                at = f"{path_of(owners[0])}.{'.'.join(path)}"
                self._replace(module, at, "instance", place, ours.node)

    def _add_called(
        self, module: Module, ours: Definition, vllms: list[Definition], own: set[str]
    ) -> None:
        """Methods and attributes of vLLM's that it has, and uses."""
        calls = {node.func: node for node in ast.walk(ours.node) if isinstance(node, ast.Call)}
        for node in ast.walk(ours.node):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "self":
                continue
            if node.attr not in own and (path := _defined_at(vllms, node.attr)):
                definition = self.sources.find(path)
                called = [calls[node]] if node in calls else []
                self._add(module.place, path, self._called(definition, called, bound=1))


def _defined_at(classes: list[Definition], name: str) -> str | None:
    return next((f"{path_of(one)}.{name}" for one in classes if name in _defined(one)), None)


def _defined(of: Definition) -> dict[str, ast.AST]:
    """What a class defines, methods or not, but for what Python itself calls."""
    found = bindings(of.class_body)
    return {name: node for name, node in found.items() if not name.startswith("__")}


def _assigned(of: Any) -> dict[tuple[str, ...], ast.stmt]:
    """Attributes that a class's methods set: ``("a", "b")`` for ``self.a.b = ...``.

    So does ``patched(self.a, "b", ...)``, for the length of a block.
    """
    found: dict[tuple[str, ...], ast.stmt] = {}
    for node in ast.walk(of) if of is not None else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "patched":
            targets = [ast.Attribute(node.args[0], ast.literal_eval(node.args[1]))]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    first, *rest = ast.unparse(part).split(".")
                    if first == "self" and rest:
                        found.setdefault(tuple(rest), node)
    return found


def without_annotations(tree: ast.Module) -> ast.Module:
    """The tree, changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return tree


def installed() -> Path | None:
    """Where the installed vLLM's sources are; it is not imported."""
    found = importlib.util.find_spec("vllm")
    return Path(found.origin).parents[1] if found and found.origin else None


if __name__ == "__main__":
    found = json.dumps(Use(installed()).to_dict(), indent=1)
    LEDGER.write_text(found + "\n", encoding="utf-8")
