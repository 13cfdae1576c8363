"""Operands of Triton's interpreter, looked at once for each combination that occurs.

Before an operation of two operands Triton 3.9.0 finds the type that both are cast to, casts
them, and gives them one shape: of two tensors of one type and shape nothing is left to do
then, and a number beside a tensor becomes the same tensor each time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from triton.language import core, semantic

_MOST_CONSTANTS = 5000
_POINTER = -1


def remember_operands() -> None:
    """To be called once."""
    _unwrap_nothing_but_constants()
    semantics = semantic.TritonSemantic
    semantics.binary_op_type_checking_impl = _Operands(semantics.binary_op_type_checking_impl).check


def _unwrap_nothing_but_constants() -> None:
    """Leaves tensors and numbers as they are: they are neither `constexpr` nor sequences."""
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = {core.tensor, int, float, bool, str, type(None)}

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = value.__class__
        if kind in plain:
            return value
        return value.value if kind is constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_constexpr


class _Pair(NamedTuple):
    """What becomes of two tensors, of one combination of types and shapes.

    `casts`: the type that each is cast to, or None. `shapes`: the shape that each is given, or
    None. `known`: what the key of this pair has the identity of, so that it is not another's.
    """

    casts: tuple[Any, Any]
    shapes: tuple[Any, Any]
    known: tuple[Any, ...]

    def apply(self, semantics: Any, place: int, value: Any) -> Any:
        """Casts a tensor, and lets it take the shape: its data stay, and NumPy repeats them."""
        cast, shape = self.casts[place], self.shapes[place]
        if cast is not None:
            value = semantics.cast(value, cast)
        if shape is not None:
            value = core.tensor(value.handle, core.block_type(value.dtype, shape))
        return value


class _Operands:
    """What is known of pairs: that they stay as they are, or which tensor a number becomes.

    By the identity of types and shapes, which are kept here or by `quicker_types`.
    """

    def __init__(self, check: Callable) -> None:
        self._check = check
        self._unchanged: dict[tuple, Any] = {}
        self._constants: dict[tuple, tuple] = {}
        self._pairs: dict[tuple, _Pair] = {}

    @property
    def check(self) -> Callable:
        """In place of `TritonSemantic.binary_op_type_checking_impl`."""
        tensor, numbers = core.tensor, {int, float}
        unchanged, constants, pairs = self._unchanged, self._constants, self._pairs
        original = self._check

        def check(
            semantics: Any, left: Any, right: Any, allow_lhs_ptr: bool = False,
            allow_rhs_ptr: bool = False, arithmetic_check: bool = True, div_or_mod: bool = False,
        ) -> tuple[Any, Any]:  # fmt: skip
            if left.__class__ is right.__class__ is tensor:
                if left.dtype is right.dtype and left.shape is right.shape:
                    key = id(left.dtype), arithmetic_check, div_or_mod
                    if key in unchanged:
                        return left, right
                pair = pairs.get(_key(left, right, arithmetic_check, div_or_mod))
                if pair is not None:
                    return pair.apply(semantics, 0, left), pair.apply(semantics, 1, right)
            elif left.__class__ is tensor and right.__class__ in numbers:
                how = right.__class__, right, arithmetic_check, div_or_mod, True
                known = constants.get((id(left.dtype), id(left.shape), how))
                if known is not None:
                    return left, known[0]
            elif right.__class__ is tensor and left.__class__ in numbers:
                how = left.__class__, left, arithmetic_check, div_or_mod, False
                known = constants.get((id(right.dtype), id(right.shape), how))
                if known is not None:
                    return known[0], right
            found = original(
                semantics, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
            )
            self._remember(left, right, found, (arithmetic_check, div_or_mod))
            return found

        return check

    def _remember(
        self, left: Any, right: Any, found: tuple[Any, Any], flags: tuple[bool, bool]
    ) -> None:
        """Unless both are pointers, or a number stands beside one."""
        kept = found[0] is left, found[1] is right
        pointers = sum(one.dtype.is_ptr() for one in found)
        if all(kept) and left.dtype is right.dtype and left.shape is right.shape and not pointers:
            self._unchanged[id(left.dtype), *flags] = left.dtype
        elif left.__class__ is right.__class__ is core.tensor and pointers < 2:
            self._remember_pair(left, right, found, flags)
        elif pointers:
            return
        elif kept == (True, False):
            self._remember_constant(left, right, found[1], (*flags, True))
        elif kept == (False, True):
            self._remember_constant(right, left, found[0], (*flags, False))

    def _remember_pair(
        self, left: Any, right: Any, found: tuple[Any, Any], flags: tuple[bool, bool]
    ) -> None:
        pairs = [(left, found[0]), (right, found[1])]
        first, second = (None if old.dtype == new.dtype else new.dtype for old, new in pairs)
        one, other = (
            None if not new.type.is_block() or old.shape == new.shape else new.type.shape
            for old, new in pairs
        )
        known = left.dtype, left.shape, right.dtype, right.shape
        self._pairs[_key(left, right, *flags)] = _Pair((first, second), (one, other), known)

    def _remember_constant(
        self, tensor: Any, number: Any, constant: Any, flags: tuple[bool, ...]
    ) -> None:
        """There are two zeros of floats; no NaN is found again."""
        if number.__class__ is not int and (number.__class__ is not float or number == 0):
            return
        if len(self._constants) >= _MOST_CONSTANTS:
            self._constants.clear()
        constant.handle.data.flags.writeable = False
        how = number.__class__, number, *flags
        known = constant, tensor.dtype, tensor.shape
        self._constants[id(tensor.dtype), id(tensor.shape), how] = known


def _key(left: Any, right: Any, *flags: bool) -> tuple[Any, ...]:
    """Types and shapes of two tensors. Types of pointers are made anew in each launch."""
    types = [
        _POINTER if one.dtype.__class__ is core.pointer_type else id(one.dtype)
        for one in (left, right)
    ]
    return (*types, id(left.shape), id(right.shape), *flags)
