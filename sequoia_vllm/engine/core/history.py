"""What earlier answers said, for later requests of the same salt and adapter.

A request gets it as a prediction. Each engine core has one store, in its memory alone.
"""

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

FEWEST_TOKENS = 4  # of an answer that is kept
MOST_TOKENS = 8_192  # of a key's answers
MOST_BYTES = 16 << 20  # of all keys together
SECONDS_KEPT = 3_600.0  # after the key's last use
# What Python keeps beside the tokens: there may be as many salts as requests, and short answers.
_BYTES_OF_KEY, _BYTES_OF_ANSWER = 1_024, 256


def key_of(cache_salt: str | None, adapter: str | None) -> bytes:
    """Whose answers these are. A digest, as salts may be long, and are nobody else's business."""
    return hashlib.sha256(repr((cache_salt, adapter)).encode()).digest()


class _Answers:
    """Answers of one key."""

    def __init__(self) -> None:
        self.kept: OrderedDict[bytes, None] = OrderedDict()  # each as int32, the latest last
        self.tokens, self.used = 0, 0.0

    @property
    def size(self) -> int:
        return _BYTES_OF_KEY + len(self.kept) * _BYTES_OF_ANSWER + 4 * self.tokens

    def add(self, answer: Sequence[int]) -> None:
        tokens = array("i", answer).tobytes()
        if tokens not in self.kept:
            self.kept[tokens] = None
            self.tokens += len(answer)
        self.kept.move_to_end(tokens)
        while self.tokens > MOST_TOKENS:
            self.tokens -= len(self.kept.popitem(last=False)[0]) // 4


class History:
    """Answers by key. The key unused for longest is forgotten first.

    Args:
        clock: Seconds since any time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.size = clock, 0  # bytes
        self._answers: OrderedDict[bytes, _Answers] = OrderedDict()  # the last used last

    def tokens(self, key: bytes) -> list[int]:
        """Tokens of this key's answers, one after the other, the latest answer first."""
        self._forget_old()
        if key not in self._answers:
            return []
        return array("i", b"".join(reversed(self._use(key).kept))).tolist()

    def add(self, key: bytes, answer: Sequence[int]) -> None:
        """Notes an answer, but for what is too short, or behind the most tokens of a key."""
        self._forget_old()
        if len(answer) < FEWEST_TOKENS:
            return
        if key not in self._answers:
            self._answers[key] = _Answers()
            self.size += _BYTES_OF_KEY
        answers = self._use(key)
        self.size -= answers.size
        answers.add(answer[:MOST_TOKENS])
        self.size += answers.size
        while self.size > MOST_BYTES:
            self._forget_first()

    def _use(self, key: bytes) -> _Answers:
        self._answers.move_to_end(key)
        self._answers[key].used = self._clock()
        return self._answers[key]

    def _forget_old(self) -> None:
        oldest = self._clock() - SECONDS_KEPT
        while self._answers and next(iter(self._answers.values())).used <= oldest:
            self._forget_first()

    def _forget_first(self) -> None:
        self.size -= self._answers.popitem(last=False)[1].size
