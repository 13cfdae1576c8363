"""Types and shapes of Triton's interpreter: made, and checked, once for each that occurs.

An operation of Triton 3.9.0's interpreter makes a type, a shape in two forms and a call
through two wrappers, which takes several times as long as the operation of NumPy's.
"""

from functools import cached_property
from typing import Any

import numpy as np
from triton.language import core, random
from triton.runtime import interpreter

_KEYS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 0xD2511F53, 0xCD9E8D57
_WORD = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(32)


def remember_types() -> None:
    """To be called once."""
    _remember_blocks()
    _call_directly()
    _draw_words_at_once()


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
