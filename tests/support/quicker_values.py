"""Values of Triton's interpreter: checked once for each type, and random words by NumPy at once."""

from typing import Any

import numpy as np
from triton.language import core, random
from triton.runtime import interpreter

_KEYS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 0xD2511F53, 0xCD9E8D57
_WORD = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(32)


def make_values_quickly() -> None:
    """To be called once."""
    _check_sizes_once()
    _draw_words_at_once()


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
