"""Tokens and logits from one vocabulary into another, on the engine's device."""

import numpy as np
import torch
from torch import Tensor

from sequoia_vllm.vocabulary.matching import NONE, Matching


class SharedVocabulary:
    """The draft's tokens are the target's."""

    def read(self, token_ids: Tensor) -> Tensor:
        """The draft's tokens for tokens of the target, any shape, of the same type."""
        return token_ids

    def target_logits(self, logits: Tensor) -> Tensor:
        """The draft's logits ``[rows, Vd]`` as logits of the target's tokens ``[rows, Vt]``."""
        return logits


class MappedVocabulary(SharedVocabulary):
    """The draft has tokens of its own (token-level intersection, arXiv 2502.05202).

    Nothing waits for the device, and shapes depend on arguments' alone: a CUDA graph may hold it.
    """

    def __init__(self, matching: Matching, device: torch.device) -> None:
        drawn = torch.from_numpy(matching.drawn)
        self._size = len(drawn)
        self._drafted = (drawn != NONE).nonzero().squeeze(1).to(device)
        columns = drawn[drawn != NONE]
        is_first = torch.equal(columns, torch.arange(len(columns)))
        self._columns = None if is_first else columns.to(device)
        read = matching.read
        self._read = None if read is None else torch.from_numpy(read).to(device)
        pairs = (torch.from_numpy(part.T.copy()) for part in _rounds(matching))
        self._sums = [part.to(device) for part in pairs]

    def read(self, token_ids: Tensor) -> Tensor:
        """See `SharedVocabulary.read`; numbers beyond the target's are read as its last."""
        if self._read is None:
            return token_ids
        known = token_ids.flatten().clamp(min=0, max=len(self._read) - 1)
        return self._read.index_select(0, known).to(token_ids.dtype).view(token_ids.shape)

    def target_logits(self, logits: Tensor) -> Tensor:
        """See `SharedVocabulary.target_logits`: -inf where the draft has no such token.

        Where it has several, their probabilities are added.
        """
        if self._sums:
            logits = logits.clone()
        for kept, added in self._sums:
            both = torch.logaddexp(logits.index_select(1, kept), logits.index_select(1, added))
            logits.index_copy_(1, kept, both)
        if self._columns is None:
            found = logits[:, : len(self._drafted)]
        else:
            found = logits.index_select(1, self._columns)
        whole = logits.new_full((len(logits), self._size), -torch.inf)
        return whole.index_copy_(1, self._drafted, found)


def _rounds(matching: Matching) -> list[np.ndarray]:
    """`Matching.also` in parts, int64 ``[e, 2]``, in each of which a kept token comes once."""
    kept = matching.also[:, 0]
    order = np.argsort(kept, kind="stable")
    _, first = np.unique(kept[order], return_index=True)
    counts = np.diff(np.append(first, len(kept)))
    rank = np.arange(len(kept)) - np.repeat(first, counts)
    pairs = matching.also[order]
    return [pairs[rank == place] for place in range(counts.max(initial=0))]
