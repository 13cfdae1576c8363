"""Types and shapes of Triton's interpreter, made once for each that occurs.

An operation of Triton 3.9.0's interpreter makes a type, a shape in two forms and a call
through two wrappers, which takes several times as long as the operation of NumPy's.
All that is checked where they are made is checked once for each type and shape.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from triton.language import core, semantic
from triton.runtime import interpreter

from tests.support.quicker_values import make_values_quickly


def remember_types() -> None:
    """To be called once."""
    _remember_blocks()
    _remember_types_of_results()
    _pass_what_is_as_wanted()
    _call_directly()
    make_values_quickly()
    core.dtype.is_int = _is_one_of(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)


def _remember_blocks() -> None:
    """Shapes, which nobody changes, of block types and of tensors, whose are of `constexpr`."""
    make_block_type, constexpr = core.block_type.__init__, core.constexpr
    of_blocks: dict[tuple, tuple] = {}
    of_scalars = core.tuple([]), constexpr(1)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if size.__class__ is constexpr else size for size in shape]
        key = (shape.__class__, *sizes)
        known = of_blocks.get(key)
        if known is None or set(map(type, sizes)) != {int}:
            make_block_type(self, element_ty, shape)
            of_tensors = core.tuple([constexpr(size) for size in self.shape]), constexpr(self.numel)
            of_blocks[key] = known = self.shape, self.numel, of_tensors
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensors = known

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalars

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(core.block_type, "name")
    core.block_type.name = name


def _remember_types_of_results() -> None:
    """What two scalar types' names say, and whether each is a number's."""
    find = semantic.TritonSemantic.computation_type_impl
    known: dict[tuple, Any] = {}

    def computation_type_impl(
        self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = find(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    semantic.TritonSemantic.computation_type_impl = computation_type_impl


def _pass_what_is_as_wanted() -> None:
    """Operands of the type and the shape of the result are neither cast nor broadcast."""
    semantics, tensor = semantic.TritonSemantic, core.tensor
    cast, broadcast = semantics._cast_to_computation_type, semantics.broadcast_impl_value
    cast_any, compare = semantics.cast, core.dtype.__eq__

    def cast_to_computation_type(self: Any, value: Any, dtype: Any) -> Any:
        if value.__class__ is tensor and value.dtype is dtype:
            return value
        return cast(self, value, dtype)

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.shape is right.shape:  # of one type of blocks, or both are scalars
            return left, right
        return broadcast(self, left, right)

    def cast_unless_it_is(self: Any, value: Any, dtype: Any, *rounding: Any, **named: Any) -> Any:
        if value.dtype is dtype.scalar:
            return value
        return cast_any(self, value, dtype, *rounding, **named)

    core.dtype.__eq__ = lambda self, other: self is other or compare(self, other)
    semantics.cast = cast_unless_it_is
    semantics._cast_to_computation_type = cast_to_computation_type
    semantics.broadcast_impl_value = broadcast_impl_value


def _call_directly() -> None:
    """Builtins are called without the wrapper that looks for the argument given here."""
    wrapper = core.builtin(_call_directly).__code__

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        is_wrapped = getattr(member, "__code__", None) is wrapper
        function = member.__wrapped__ if is_wrapped else member

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr


def _is_one_of(names: list[str]) -> Callable[[Any], bool]:
    known = frozenset(names)
    return lambda self: self.name in known
