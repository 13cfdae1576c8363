"""The contract of `contract`, checked by reading vLLM's sources, without importing them.

For wheels that cannot run where the check is made: the GPU wheels on a machine
without CUDA (``make contract``). It takes the same lists and answers in the same
words as `contract.differences`.

What a name stands for is found as Python would: imports and aliases are
followed, base classes searched (left to right, depth first), and decorators
taken to keep the signature, as ``functools.wraps`` does. Where only running the
code would tell, it takes the first branch of an ``if`` (none of
``if TYPE_CHECKING``) and the body of a ``try``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sequoia_vllm.engine.compat.ledger import Expected, Signature

Function = ast.FunctionDef | ast.AsyncFunctionDef

_CACHES = ("cache", "lru_cache")
_CACHE_ATTRIBUTES = ("cache_clear", "cache_info", "cache_parameters")
_ENUMS = ("enum.Enum", "enum.IntEnum", "enum.StrEnum", "enum.Flag", "enum.IntFlag")
_NAMED_TUPLE = "typing.NamedTuple"


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


def source_differences(root: Path, expectations: Iterable[Expected]) -> list[str]:
    """How the sources differ from what we expect; empty if they fit."""
    sources = Sources(root)
    found = []
    for expected in expectations:
        try:
            definition = sources.find(expected.path)
        except NotFoundError as error:
            found.append(f"{expected.path} is missing ({error})")
            continue
        if expected.parameters is None:
            continue
        try:
            signature = sources.signature(definition)
        except NotFoundError as error:
            found.append(f"{expected.path} has no parameters to compare ({error})")
            continue
        if difference := expected.difference(signature):
            found.append(difference)
    return found


class Sources:
    """The definitions in directories of Python packages.

    Args:
        roots: The directories that hold the packages.
    """

    def __init__(self, *roots: Path) -> None:
        self._roots = roots
        self._names = cache(self._read_names)  # each module is parsed once
        self._under_way: set[tuple[str, str]] = set()  # names that are being followed

    def find(self, path: str) -> Definition:
        """What ``module:attribute[.attribute]`` stands for.

        Raises:
            NotFoundError: It is not in the sources.
        """
        module, _, attributes = path.partition(":")
        if self._file(module) is None:
            raise NotFoundError(f"no module {module}")
        found = Definition(module, module)
        for name in attributes.split("."):
            found = self._attribute(found, name)
        return found

    def signature(self, definition: Definition) -> Signature:
        """A callable's parameters, as ``inspect.signature`` has them.

        Raises:
            NotFoundError: It is not callable, or its source does not tell.
        """
        node = definition.node
        if isinstance(node, ast.ClassDef) and not definition.is_instance:
            return self._constructor_signature(definition)
        if not isinstance(node, Function):
            raise NotFoundError(f"{definition.name} is no function or class in the sources")
        decorators = _decorators(node)
        if any(name.endswith("property") for name in decorators):
            raise NotFoundError(f"{definition.name} is a property")
        owner = definition.owner
        if owner is None or "staticmethod" in decorators:
            return _signature(node.args)
        is_bound = owner.is_instance or "classmethod" in decorators
        return _signature(node.args, is_bound)

    # -- names ---------------------------------------------------------------------

    def _file(self, module: str) -> Path | None:
        """The module's source; None if there is none (a namespace package has none)."""
        paths = [root.joinpath(*module.split(".")) for root in self._roots]
        candidates = [(path.with_name(path.name + ".py"), path / "__init__.py") for path in paths]
        return next((file for pair in candidates for file in pair if file.is_file()), None)

    def _is_outside(self, module: str) -> bool:
        package = module.partition(".")[0]
        is_there = any((root / package).is_dir() for root in self._roots)
        return self._file(package) is None and not is_there

    def _read_names(self, module: str) -> dict[str, ast.AST]:
        file = self._file(module)
        if file is None:
            raise NotFoundError(f"no module {module}")
        return _bindings(ast.parse(file.read_text(encoding="utf-8"), str(file)).body)

    def _attribute(self, of: Definition, name: str) -> Definition:
        if isinstance(of.node, ast.ClassDef):
            return self._class_attribute(of, name)
        full_name = f"{of.name}.{name}"
        if isinstance(of.node, Function):
            if name in _CACHE_ATTRIBUTES and set(_decorators(of.node)) & set(_CACHES):
                return Definition(full_name, of.module)
            raise NotFoundError(f"the function {of.name} has no {name}")
        if of.name != of.module:
            raise NotFoundError(f"{of.name} is a value: only running the code tells its {name}")
        return self._module_attribute(of.module, name)

    def _module_attribute(self, module: str, name: str) -> Definition:
        if self._is_outside(module):
            return Definition(f"{module}.{name}", f"{module}.{name}")
        names = self._names(module)
        if name in names:
            if (module, name) in self._under_way:
                raise NotFoundError(f"{module}.{name} is imported in a circle")
            self._under_way.add((module, name))
            try:
                return self._define(names[name], Definition(f"{module}.{name}", module))
            finally:
                self._under_way.discard((module, name))
        submodule = f"{module}.{name}"
        if self._file(submodule) is None:
            raise NotFoundError(f"module {module} has no {name}")
        return Definition(submodule, submodule)

    def _define(self, node: ast.AST, found: Definition) -> Definition:
        """``found``, filled in from the statement that binds its name."""
        if isinstance(node, Function | ast.ClassDef):
            return Definition(found.name, found.module, node, found.owner)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._imported(node, found)
        if isinstance(node, ast.Name | ast.Attribute):  # an alias
            return self._evaluate(node, found.module) or found
        return found

    def _imported(self, node: ast.Import | ast.ImportFrom, found: Definition) -> Definition:
        alias = node.names[0]
        if isinstance(node, ast.Import):
            module = alias.name if alias.asname else alias.name.partition(".")[0]
            return Definition(module, module)
        module = node.module or ""
        if node.level:
            parts = found.module.split(".")
            file = self._file(found.module)
            is_package = file is not None and file.name == "__init__.py"
            parts = parts[: len(parts) - node.level + is_package]
            module = ".".join([*parts, *([module] if module else [])])
        return self._module_attribute(module, alias.name)

    def _evaluate(self, node: ast.expr, module: str) -> Definition | None:
        """What an expression of names stands for; None if it cannot be followed."""
        try:
            if isinstance(node, ast.Name):
                return self._module_attribute(module, node.id)
            if isinstance(node, ast.Attribute):
                of = self._evaluate(node.value, module)
                return None if of is None else self._attribute(of, node.attr)
            if isinstance(node, ast.Subscript):  # a generic base: Base[Item]
                return self._evaluate(node.value, module)
        except NotFoundError:
            return None
        return None

    # -- classes -------------------------------------------------------------------

    def _bases(self, of: Definition) -> Iterator[Definition]:
        """The class itself and its bases, left to right and depth first."""
        yield of
        if isinstance(of.node, ast.ClassDef):
            for base in of.node.bases:
                found = self._evaluate(base, of.module)
                if found is not None:
                    yield from self._bases(found)

    def _is_a(self, of: Definition, names: Iterable[str]) -> bool:
        return any(base.name in names for base in self._bases(of))

    def _is_named_tuple(self, of: Definition) -> bool:
        """Whether it declares the fields; a class derived from one inherits them."""
        bases = of.node.bases if isinstance(of.node, ast.ClassDef) else []
        found = [self._evaluate(base, of.module) for base in bases]
        return any(base is not None and base.name == _NAMED_TUPLE for base in found)

    def _class_attribute(self, of: Definition, name: str) -> Definition:
        unread = []
        for base in self._bases(of):
            if not isinstance(base.node, ast.ClassDef):
                unread.append(base.name)
                continue
            node = _bindings(base.node.body).get(name)
            if node is None:
                if name in self._field_names(base):
                    return Definition(f"{base.name}.{name}", base.module)
                continue
            if isinstance(node, ast.expr) and self._is_a(base, _ENUMS):
                full_name = f"{base.name}.{name}"
                return Definition(full_name, base.module, base.node, is_instance=True)
            return self._define(node, Definition(f"{base.name}.{name}", base.module, owner=of))
        note = f"; not read: {', '.join(unread)}" if unread else ""
        raise NotFoundError(f"class {of.name} has no {name}{note}")

    def _field_names(self, of: Definition) -> tuple[str, ...]:
        """Fields that a dataclass or named tuple itself declares; otherwise none."""
        if not isinstance(of.node, ast.ClassDef):
            return ()
        if "dataclass" not in _decorators(of.node) and not self._is_named_tuple(of):
            return ()
        return tuple(field.name for field in _fields(of.node))

    def _constructor_signature(self, of: Definition) -> Signature:
        for base in self._bases(of):
            if not isinstance(base.node, ast.ClassDef):
                continue
            names = _bindings(base.node.body)
            constructor = names.get("__new__") or names.get("__init__")
            if isinstance(constructor, Function):
                return _signature(constructor.args, is_bound=True)
            if "dataclass" in _decorators(base.node):
                return _signature_of_fields(self._dataclass_parameters(base))
            if self._is_named_tuple(base):
                return _signature_of_fields(_fields(base.node))
        raise NotFoundError(f"no constructor of {of.name} in the sources")

    def _dataclass_parameters(self, of: Definition) -> list[_Field]:
        fields: dict[str, _Field] = {}
        for base in reversed(list(self._bases(of))):
            if isinstance(base.node, ast.ClassDef) and "dataclass" in _decorators(base.node):
                # A field that is defined again keeps its place.
                fields |= {field.name: field for field in _fields(base.node)}
        taken = [field for field in fields.values() if field.is_parameter]
        taken.sort(key=lambda field: field.is_keyword)
        return taken


# -- the syntax tree -----------------------------------------------------------------------


def _bindings(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """The names that these statements bind, each to what it is bound to.

    That is a function, a class, an import of this one name, or an expression.
    """
    names: dict[str, ast.AST] = {}
    for statement in body:
        names.update(_bound_by(statement))
    return names


def _bound_by(statement: ast.stmt) -> dict[str, ast.AST]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {statement.name: statement}
        case ast.Import():
            return {
                alias.asname or alias.name.partition(".")[0]: ast.Import([alias])
                for alias in statement.names
            }
        case ast.ImportFrom(module, aliases, level):
            return {
                alias.asname or alias.name: ast.ImportFrom(module, [alias], level)
                for alias in aliases
            }
        case ast.Assign(targets, value):
            return {target.id: value for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
            return {name: value}
        case ast.If(test, body, orelse):
            is_for_types = ast.unparse(test).endswith("TYPE_CHECKING")
            return _bindings(orelse) | ({} if is_for_types else _bindings(body))
        case ast.Try():
            rare = [line for handler in statement.handlers for line in handler.body]
            usual = [*statement.body, *statement.orelse, *statement.finalbody]
            return _bindings(rare) | _bindings(usual)
        case ast.With():
            return _bindings(statement.body)
    return {}


def _decorators(node: Function | ast.ClassDef) -> list[str]:
    """Last parts of the decorators' names, without arguments."""
    called = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return [ast.unparse(decorator).rpartition(".")[2] for decorator in called]


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


@dataclass(frozen=True)
class _Field:
    """A field of a dataclass or named tuple."""

    name: str
    is_parameter: bool
    is_keyword: bool
    is_required: bool


def _fields(node: ast.ClassDef) -> Iterator[_Field]:
    """The fields that this class itself declares."""
    is_keyword = _is_set(_call_to("dataclass", node.decorator_list), "kw_only")
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation = ast.unparse(statement.annotation)
        if annotation.endswith("KW_ONLY"):
            is_keyword = True
            continue
        if "ClassVar" in annotation:
            continue
        options = _call_to("field", [statement.value] if statement.value else [])
        yield _Field(
            statement.target.id,
            is_parameter=_is_set(options, "init", default=True),
            is_keyword=_is_set(options, "kw_only", default=is_keyword),
            is_required=statement.value is None or (options is not None and not _defaults(options)),
        )


def _defaults(options: ast.Call) -> bool:
    """Whether this call of ``field`` gives a default."""
    return any(given.arg in ("default", "default_factory") for given in options.keywords)


def _signature_of_fields(fields: Iterable[_Field]) -> Signature:
    fields = list(fields)
    return Signature(
        names=tuple(field.name for field in fields),
        required=frozenset(field.name for field in fields if field.is_required),
    )


def _call_to(name: str, expressions: Iterable[ast.expr]) -> ast.Call | None:
    for node in expressions:
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
            return node
    return None


def _is_set(call: ast.Call | None, keyword: str, default: bool = False) -> bool:
    for given in call.keywords if call else ():
        if given.arg == keyword and isinstance(given.value, ast.Constant):
            return bool(given.value.value)
    return default
