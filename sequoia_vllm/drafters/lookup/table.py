"""Which tokens followed others, of any request, by the target's logits."""

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger("vllm.sequoia")

SUCCESSORS = 8
"""Tokens kept of each token's successors."""
MOST_LEARNED = 256
"""Rows of logits that a step learns from; of more rows it takes every second, third, ..."""
# Logits of other tokens, and of successors by rank. Exact in bfloat16, as Q is what is drawn from.
OTHERS = -30.0
BY_RANK = (0.0, -1.25, -1.75, -2.0, -2.25, -2.5, -3.0, -3.0)


class Successors:
    """The target's latest likeliest successors of each token, and the logits that they give.

    They are kept for the base model and each of ``adapters`` LoRA adapters.
    """

    def __init__(
        self, vocab_size: int, dtype: torch.dtype, device: torch.device, adapters: int = 0
    ) -> None:
        self._vocab_size = vocab_size
        kept, rows = min(SUCCESSORS, vocab_size), (adapters + 1) * (vocab_size + 1)
        # int32 ``[(A + 1) * (V + 1), k]``, the base model's rows first: likeliest first; -1:
        # nothing is known. The last row of each model takes what is not kept.
        self.table = torch.full((rows, kept), -1, dtype=torch.int32, device=device)
        mib = self.table.nbytes / (1 << 20)
        own = f", with one for each of {adapters} adapters" if adapters else ""
        logger.info("Sequoia: the table of what follows each token takes %.1f MiB%s", mib, own)
        self._values = torch.tensor(BY_RANK[:kept], dtype=dtype, device=device)
        self._unused = [place * (vocab_size + 1) for place in range(adapters, 0, -1)]
        self._of_adapters: dict[int, int] = {}  # the one that was not used for longest first

    def first_rows(self, adapters: NDArray[np.integer]) -> NDArray[np.int64]:
        """First rows ``[R]`` of the tables of adapters ``[R]``, their ids in vLLM; 0: none.

        An adapter without a table takes over the one that was not used for longest, emptied.
        """
        ids, places = np.unique(adapters, return_inverse=True)
        return np.array([self._first_row(int(one)) for one in ids], dtype=np.int64)[places]

    def _first_row(self, adapter: int) -> int:
        if adapter == 0:
            return 0
        if (first := self._of_adapters.pop(adapter, None)) is None:
            if self._unused:
                first = self._unused.pop()
            else:
                first = self._of_adapters.pop(next(iter(self._of_adapters)))
                self.table[first : first + self._vocab_size + 1].fill_(-1)
        self._of_adapters[adapter] = first
        return first

    def learn(self, tokens: Tensor, logits: Tensor, first_rows: Tensor | None = None) -> None:
        """Notes what the target expects after tokens; of rows of one token the last is kept.

        All ranks of an engine keep the same: they draft the same trees.

        Args:
            tokens: int ``[R]``.
            logits: ``[R, V]``: the target's, after each of them.
            first_rows: int64 ``[R]``: see `first_rows`; None: the base model's.
        """
        step = len(tokens) // (MOST_LEARNED + 1) + 1
        rows = tokens.long().clamp(max=self._vocab_size)
        rows = (rows if first_rows is None else rows + first_rows)[::step]
        comes_again = (rows == rows[:, None]).triu(1).any(dim=1)
        kept = logits[::step].topk(self.table.shape[1], dim=1).indices.int()
        self.table[rows.masked_fill(comes_again, self._vocab_size)] = kept

    def logits(self, tokens: Tensor, first_rows: Tensor | None = None) -> Tensor:
        """Logits ``[R, V]`` after tokens int64 ``[R]``; ``first_rows`` as in `learn`."""
        nowhere = self._vocab_size
        successors = self.table[tokens if first_rows is None else tokens + first_rows].long()
        places = successors.masked_fill(successors < 0, nowhere)
        found = self._values.new_full((len(places), nowhere + 1), OTHERS)
        return found.scatter_(1, places, self._values.expand(places.shape))[:, :nowhere]
