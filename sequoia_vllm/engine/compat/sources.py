"""The contract of `contract`, checked by reading vLLM's sources, without importing them.

It takes the same lists and answers in the same words as `contract.differences`. Reading takes a
tenth of the time of importing, which is why ``sequoia-vllm doctor`` reads. And wheels can be read
that cannot run where the check is made: the GPU wheels on a machine without CUDA
(``make contract``).

What a name stands for is found as Python would: imports and aliases are
followed, base classes searched (left to right, depth first), and decorators
taken to keep the signature, as ``functools.wraps`` does. Where only running the
code would tell, it takes the first branch of an ``if`` (none of
``if TYPE_CHECKING``) and the body of a ``try``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sequoia_vllm.engine.compat.ledger import Expected, Signature

Function = ast.FunctionDef | ast.AsyncFunctionDef

FOLLOWED = ("vllm", "sequoia_vllm", "tests")  # what other packages define is not known
_CACHES = {"cache", "lru_cache"}
_CACHE_ATTRIBUTES = ("cache_clear", "cache_info", "cache_parameters")
_ENUMS = ("enum.Enum", "enum.IntEnum", "enum.StrEnum", "enum.Flag", "enum.IntFlag")


class NotFoundError(LookupError):
    """The sources do not define this, or not in a way that reading can follow."""


@dataclass(frozen=True)
class Definition:
    """What a name stands for.

    Attributes:
        name: Full name, ``module.attribute``.
        module: The module whose names its source uses.
        node: Its function or class; None: a module, a value, a field of a dataclass,
            or outside the sources.
        owner: The class that was asked for it; None for names of a module.
        is_instance: It is a member of an enum, an instance of ``node``.
    """

    name: str
    module: str
    node: Function | ast.ClassDef | None = None
    owner: Definition | None = None
    is_instance: bool = False

    @property
    def class_body(self) -> list[ast.stmt]:
        """Statements of a class; of something else none."""
        return self.node.body if isinstance(self.node, ast.ClassDef) else []

    @property
    def is_dataclass(self) -> bool:
        """Whether it is a class with the decorator ``dataclass``."""
        return isinstance(self.node, ast.ClassDef) and "dataclass" in _decorators(self.node)

    @property
    def fields(self) -> dict[str, dict[str | None, object]]:
        """Fields that a dataclass itself declares, and arguments of ``field`` that give them."""
        return {
            statement.target.id: _options(statement.value)
            for statement in (self.class_body if self.is_dataclass else ())
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and "ClassVar" not in ast.unparse(statement.annotation)
        }


def source_differences(root: Path, expectations: Iterable[Expected]) -> list[str]:
    """How the sources differ from what we expect; empty if they fit."""
    sources, found = Sources(root), []
    for expected in expectations:
        missing = "is missing"
        try:
            definition = sources.find(expected.path)
            missing = "has no parameters to compare"
            if expected.parameters is not None:
                found.append(expected.difference(sources.signature(definition)))
        except NotFoundError as error:
            found.append(f"{expected.path} {missing} ({error})")
    return [difference for difference in found if difference]


class Sources:
    """The definitions in directories (`roots`) of Python packages."""

    def __init__(self, *roots: Path) -> None:
        self._roots = roots
        self._names = cache(self._read_names)
        self._under_way: set[tuple[str, str]] = set()  # names that are being followed

    def find(self, path: str) -> Definition:
        """What ``module:attribute[.attribute]`` stands for; raises `NotFoundError`."""
        module, _, attributes = path.partition(":")
        found = Definition(module, module)
        for name in attributes.split("."):
            found = self._attribute(found, name)
        return found

    def signature(self, definition: Definition) -> Signature:
        """A callable's parameters, as ``inspect.signature`` has them.

        Raises:
            NotFoundError: It is not callable, or its source does not tell.
        """
        node, owner = definition.node, definition.owner
        if isinstance(node, ast.ClassDef) and not definition.is_instance:
            return self._constructor_signature(definition)
        if not isinstance(node, Function):
            raise NotFoundError(f"{definition.name} is no function or class in the sources")
        decorators = _decorators(node)
        if any(name.endswith("property") for name in decorators):
            raise NotFoundError(f"{definition.name} is a property")
        if owner is None or "staticmethod" in decorators:
            return _signature(node.args)
        return _signature(node.args, owner.is_instance or "classmethod" in decorators)

    # -- names ---------------------------------------------------------------------

    def _file(self, module: str) -> Path | None:
        """The module's source; None if there is none (a namespace package has none)."""
        paths = [root.joinpath(*module.split(".")) for root in self._roots]
        files = [one for path in paths for one in (path.with_suffix(".py"), path / "__init__.py")]
        return next((file for file in files if file.is_file()), None)

    def _read_names(self, module: str) -> dict[str, ast.AST]:
        file = self._file(module)
        if file is None:
            raise NotFoundError(f"no module {module}")
        return _bindings_of(file)

    def _attribute(self, of: Definition, name: str) -> Definition:
        if isinstance(of.node, ast.ClassDef):
            return self._class_attribute(of, name)
        if isinstance(of.node, Function):
            if name in _CACHE_ATTRIBUTES and _CACHES & set(_decorators(of.node)):
                return Definition(f"{of.name}.{name}", of.module)
            raise NotFoundError(f"the function {of.name} has no {name}")
        if of.name != of.module:
            raise NotFoundError(f"{of.name} is a value: only running the code tells its {name}")
        return self._module_attribute(of.module, name)

    def _module_attribute(self, module: str, name: str) -> Definition:
        full_name, key = f"{module}.{name}", (module, name)
        outside = module.partition(".")[0] not in FOLLOWED
        if not outside and name in (names := self._names(module)):
            if key in self._under_way:
                raise NotFoundError(f"{full_name} is imported in a circle")
            self._under_way.add(key)
            try:
                return self._define(names[name], Definition(full_name, module))
            finally:
                self._under_way.discard(key)
        if not outside and self._file(full_name) is None:
            raise NotFoundError(f"module {module} has no {name}")
        return Definition(full_name, full_name)

    def _define(self, node: ast.AST, found: Definition) -> Definition:
        """``found``, filled in from the statement that binds its name."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return replace(found, node=node)
            case ast.Import(names=[alias]):
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                return Definition(module, module)
            case ast.ImportFrom(module, [alias], level):
                file = self._file(found.module)
                is_package = file is not None and file.name == "__init__.py"
                parts = found.module.split(".")
                parts = parts[: len(parts) - level + is_package] if level else []
                parts += [module] if module else []
                return self._module_attribute(".".join(parts), alias.name)
            case ast.Name() | ast.Attribute():  # an alias
                return self._evaluate(node, found.module) or found
        return found

    def _evaluate(self, node: ast.expr, module: str) -> Definition | None:
        """What an expression of names stands for; None if it cannot be followed."""
        try:
            if isinstance(node, ast.Name):
                return self._module_attribute(module, node.id)
            if isinstance(node, ast.Attribute | ast.Subscript):  # a generic base: Base[Item]
                of = self._evaluate(node.value, module)
                if of is None or isinstance(node, ast.Subscript):
                    return of
                return self._attribute(of, node.attr)
        except NotFoundError:
            pass
        return None

    # -- classes -------------------------------------------------------------------

    def _bases(self, of: Definition) -> Iterator[Definition]:
        """The class itself and its bases, left to right and depth first."""
        yield of
        for node in of.node.bases if isinstance(of.node, ast.ClassDef) else ():
            if base := self._evaluate(node, of.module):
                yield from self._bases(base)

    def _class_attribute(self, of: Definition, name: str) -> Definition:
        unread = []
        for base in self._bases(of):
            found = Definition(f"{base.name}.{name}", base.module)
            if not isinstance(base.node, ast.ClassDef):
                unread.append(base.name)
            elif node := bindings(base.class_body).get(name):
                is_enum = any(one.name in _ENUMS for one in self._bases(base))
                if isinstance(node, ast.expr) and is_enum:
                    return replace(found, node=base.node, is_instance=True)
                return self._define(node, replace(found, owner=of))
            elif name in base.fields:
                return found
        note = f"; not read: {', '.join(unread)}" if unread else ""
        raise NotFoundError(f"class {of.name} has no {name}{note}")

    def _constructor_signature(self, of: Definition) -> Signature:
        for base in self._bases(of):
            names = bindings(base.class_body)
            constructor = names.get("__new__") or names.get("__init__")
            if isinstance(constructor, Function):
                return _signature(constructor.args, is_bound=True)
            if base.is_dataclass:
                fields: dict[str, dict[str | None, object]] = {}
                for one in reversed(list(self._bases(base))):
                    fields |= one.fields  # a field that is defined again keeps its place
                taken = [name for name, options in fields.items() if options.get("init", True)]
                defaults = {"default", "default_factory"}
                required = [name for name in taken if not defaults & fields[name].keys()]
                return Signature(tuple(taken), frozenset(required))
        raise NotFoundError(f"no constructor of {of.name} in the sources")


# -- the syntax tree -----------------------------------------------------------------------


def bindings(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """The names that these statements bind, each to what it is bound to.

    That is a function, a class, an import of this one name, or an expression.
    """
    names: dict[str, ast.AST] = {}
    for statement in body:
        names.update(_bound_by(statement))
    return names


@cache
def _bindings_of(file: Path) -> dict[str, ast.AST]:
    """The names that a module binds; each is parsed once per process."""
    return bindings(ast.parse(file.read_text(encoding="utf-8"), str(file)).body)


def _bound_by(statement: ast.stmt) -> dict[str, ast.AST]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {statement.name: statement}
        case ast.Import(names):
            return {one.asname or one.name.partition(".")[0]: ast.Import([one]) for one in names}
        case ast.ImportFrom(module, names, level):
            return {one.asname or one.name: ast.ImportFrom(module, [one], level) for one in names}
        case ast.Assign(targets, value):
            return {target.id: value for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
            return {name: value}
        case ast.If(test, body, orelse):
            is_for_types = ast.unparse(test).endswith("TYPE_CHECKING")
            return bindings(orelse) | ({} if is_for_types else bindings(body))
        case ast.Try(body, handlers, orelse, finalbody):
            rare = [line for handler in handlers for line in handler.body]
            return bindings(rare) | bindings([*body, *orelse, *finalbody])
        case ast.With():
            return bindings(statement.body)
    return {}


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def _decorators(node: Function | ast.ClassDef) -> list[str]:
    """Last parts of the decorators' names, without arguments."""
    return [_last_name(decorator) for decorator in node.decorator_list]


def _signature(arguments: ast.arguments, is_bound: bool = False) -> Signature:
    """The parameters; of a bound method without the first."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    without_default += [argument for argument, default in keywords if default is None]
    ordered = [*positional, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    names = [argument.arg for argument in ordered if argument is not None][is_bound:]
    required = {argument.arg for argument in without_default}
    return Signature(tuple(names), frozenset(required.intersection(names)))


def _options(value: ast.expr | None) -> dict[str | None, object]:
    """The arguments of ``field(...)``, as which a plain value of a field's is its default."""
    if isinstance(value, ast.Call) and _last_name(value) == "field":
        return {one.arg: getattr(one.value, "value", True) for one in value.keywords}
    return {"default": True} if value else {}
