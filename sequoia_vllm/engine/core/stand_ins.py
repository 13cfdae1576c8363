"""Chooses tokens to score in place of drafts that a grammar forbids, where it allows few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_ALLOWED = 8
"""Drafts are replaced where the grammar allows this many tokens or fewer. Where it allows more, a
choice without a model is hardly ever right, and the grammar would have to check everything below. A
forced string allows few: the tokens that are a beginning of it.
"""


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """Whether a mask, int32 ``[V / 32]``, allows this token; none if it is negative."""
    return token >= 0 and bool(mask[token // 32] >> (token % 32) & 1)


@dataclass(frozen=True)
class StandIns:
    """Chooses tokens for the children of a node, by its mask and their drafts alone."""

    vocabulary: int  # tokens that the target has; masks may have more
    length_of: Callable[[int], int]  # length of a token's text

    @classmethod
    def of(cls, manager: Any) -> StandIns:
        """Stand-ins for the engine of vLLM's `StructuredOutputManager`."""
        tokenizer = manager.tokenizer

        @lru_cache(maxsize=4096)
        def length_of(token: int) -> int:
            [text] = tokenizer.convert_ids_to_tokens([token])
            return len(text or "")  # ids of no token have none

        return cls(manager.vllm_config.model_config.get_vocab_size(), length_of)

    def __call__(self, mask: NDArray[np.int32], drafts: Sequence[int]) -> list[int]:
        """A token for each child: its draft if it is allowed, else one that no sibling has.

        The longest come first: a tokenizer mostly takes as much of a forced string as it can.

        Args:
            mask: int32 ``[V / 32]``: what the grammar allows after the node.
            drafts: Its children's drafts, all different.

        Returns:
            Different tokens. A forbidden draft stays where no token is left, or too many are
            allowed.
        """
        if all(allows(mask, token) for token in drafts):
            return list(drafts)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=self.vocabulary)
        allowed = np.flatnonzero(bits)
        if len(allowed) > MOST_ALLOWED:
            return list(drafts)
        free = set(allowed.tolist()).difference(drafts)
        best = iter(sorted(free, key=lambda token: (-self.length_of(token), token)))
        return [token if allows(mask, token) else next(best, token) for token in drafts]
