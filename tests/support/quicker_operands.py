"""Operands of Triton's interpreter, looked at once for each combination that occurs.

Before an operation of two operands Triton 3.9.0 finds the type that both are cast to, casts
them, and gives them one shape: of two tensors of one type and shape nothing is left to do
then, and a number beside a tensor becomes the same tensor each time.
"""

from collections.abc import Callable
from typing import Any

from triton.language import core, semantic

_MOST_CONSTANTS = 5000


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


class _Operands:
    """What is known of pairs: that they stay as they are, or which tensor a number becomes.

    By the identity of types and shapes, which are kept here or by `quicker_types`.
    """

    def __init__(self, check: Callable) -> None:
        self._check = check
        self._unchanged: dict[tuple, Any] = {}
        self._constants: dict[tuple, tuple] = {}

    @property
    def check(self) -> Callable:
        """In place of `TritonSemantic.binary_op_type_checking_impl`."""
        tensor, numbers = core.tensor, {int, float}
        unchanged, constants, original = self._unchanged, self._constants, self._check

        def check(
            semantics: Any, left: Any, right: Any, allow_lhs_ptr: bool = False,
            allow_rhs_ptr: bool = False, arithmetic_check: bool = True, div_or_mod: bool = False,
        ) -> tuple[Any, Any]:  # fmt: skip
            if left.__class__ is right.__class__ is tensor:
                if left.dtype is right.dtype and left.shape is right.shape:
                    key = id(left.dtype), arithmetic_check, div_or_mod
                    if key in unchanged:
                        return left, right
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
        """Unless a tensor of the pair was cast or broadcast, or is of pointers."""
        kept = found[0] is left, found[1] is right
        if any(one.dtype.is_ptr() for one in found):
            return
        if all(kept) and left.dtype is right.dtype and left.shape is right.shape:
            self._unchanged[id(left.dtype), *flags] = left.dtype
        elif kept == (True, False):
            self._remember_constant(left, right, found[1], (*flags, True))
        elif kept == (False, True):
            self._remember_constant(right, left, found[0], (*flags, False))

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
