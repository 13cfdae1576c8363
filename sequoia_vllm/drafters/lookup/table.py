"""Which tokens followed others, of any request, by the target's logits."""

import logging

import torch
from torch import Tensor

logger = logging.getLogger("vllm.sequoia")

SUCCESSORS = 8
"""Tokens kept of each token's successors."""
MOST_LEARNED = 256
"""Rows of logits that a step learns from; of more rows it takes every second, third, ..."""
# Logits of the successors by rank, and of all other tokens. They are exact in bfloat16: Q must be
# what children are drawn from.
OTHERS = -30.0
BY_RANK = (0.0, -1.25, -1.75, -2.0, -2.25, -2.5, -3.0, -3.0)


class Successors:
    """The target's latest likeliest successors of each token, and the logits that they give.

    Attributes:
        table: int32 ``[V + 1, k]``: likeliest first; -1: nothing is known. The last row takes what
            is not kept.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._vocab_size = vocab_size
        kept = min(SUCCESSORS, vocab_size)
        self.table = torch.full((vocab_size + 1, kept), -1, dtype=torch.int32, device=device)
        mib = self.table.nbytes / (1 << 20)
        logger.info("Sequoia: the table of what follows each token takes %.1f MiB", mib)
        self._values = torch.tensor(BY_RANK[:kept], dtype=dtype, device=device)

    def learn(self, tokens: Tensor, logits: Tensor) -> None:
        """Notes what the target expects after tokens; of rows of one token the last is kept.

        All ranks of an engine keep the same: they draft the same trees.

        Args:
            logits: ``[R, V]``: the target's, after each of them.
        """
        step = len(tokens) // (MOST_LEARNED + 1) + 1
        tokens, logits = tokens[::step].long(), logits[::step]
        comes_again = (tokens == tokens[:, None]).triu(1).any(dim=1)
        rows = tokens.masked_fill(comes_again, self._vocab_size).clamp(max=self._vocab_size)
        self.table[rows] = logits.topk(self.table.shape[1], dim=1).indices.int()

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits ``[R, V]`` after tokens int64 ``[R]``."""
        nowhere = self._vocab_size
        successors = self.table[tokens].long()
        places = successors.masked_fill(successors < 0, nowhere)
        found = self._values.new_full((len(places), nowhere + 1), OTHERS)
        return found.scatter_(1, places, self._values.expand(places.shape))[:, :nowhere]
