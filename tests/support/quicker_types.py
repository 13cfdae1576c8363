"""Types, shapes and values of Triton's interpreter: made, and checked, once for each that occurs.

An operation of Triton 3.9.0's interpreter makes a type, a shape in two forms and a call
through two wrappers, which takes several times as long as the operation of NumPy's.
All that is checked where they are made is checked once for each type and shape.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from triton.language import core, random, semantic
from triton.runtime import interpreter

_KEYS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 0xD2511F53, 0xCD9E8D57
_WORD = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(32)


def remember_types() -> None:
    """To be called once."""
    _remember_blocks()
    _remember_types_of_results()
    _pass_what_is_as_wanted()
    _call_directly()
    _check_sizes_once()
    _draw_words_at_once()
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


def _check_sizes_once() -> None:
    """Whether numbers of NumPy's fit into a type of Triton's is found once for each two types."""
    fits, pointer_type = interpreter._validate_np_data_size, core.pointer_type
    known: dict[tuple[Any, int], tuple[bool, Any]] = {}

    def validate(data: Any, dtype: Any) -> bool:
        if dtype.__class__ is pointer_type:
            return True
        key = data.dtype, id(dtype)
        found = known.get(key)
        if found is None:
            known[key] = found = fits(data, dtype), dtype
        return found[0]

    def init(self: Any, data: Any, dtype: Any, attr: dict | None = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr
        if not validate(data, dtype):
            self.__post_init__()

    interpreter._validate_np_data_size = validate
    interpreter.TensorHandle.__init__ = init


def _draw_words_at_once() -> None:
    """Philox takes Triton a hundred operations; of 64 bits it does them still."""
    interpreted = random.philox_impl

    def philox_impl(*words: Any, n_rounds: Any = random.N_ROUNDS_DEFAULT) -> tuple[Any, ...]:
        *words, rounds = (*words, n_rounds) if len(words) == 6 else words  # type: ignore[assignment]
        if any(word.dtype != core.uint32 for word in words):
            return interpreted(*words, rounds)
        state = _philox([word.handle.data for word in words], core._unwrap_if_constexpr(rounds))
        blocks = [word.type for word in words if word.type.is_block()]
        kind = core.block_type(core.uint32, list(state[0].shape)) if blocks else core.uint32
        return tuple(
            core.tensor(interpreter.TensorHandle(word, core.uint32), kind) for word in state
        )

    random.philox_impl = philox_impl


def _philox(words: list[np.ndarray], rounds: int) -> list[np.ndarray]:
    """Four uint32 of the counter and the key that ``words`` has, six blocks of uint32."""
    first, second, third, fourth, *keys = np.broadcast_arrays(*words)
    wide = [word.astype(np.uint64) for word in (first, second, third, fourth, *keys)]
    c0, c1, c2, c3, k0, k1 = wide
    a, b = (np.uint64(number) for number in _ROUNDS)
    for _ in range(rounds):
        left, right = b * c2, a * c0
        c0, c1, c2, c3 = (
            (left >> _BITS) ^ c1 ^ k0, left & _WORD, (right >> _BITS) ^ c3 ^ k1, right & _WORD,
        )  # fmt: skip
        k0, k1 = (k0 + np.uint64(_KEYS[0])) & _WORD, (k1 + np.uint64(_KEYS[1])) & _WORD
    return [word.astype(np.uint32) for word in (c0, c1, c2, c3)]
