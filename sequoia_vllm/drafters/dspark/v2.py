"""DSpark heads on Model Runner V2: DFlash blocks, corrected by the tokens drafted in them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.drafters.dflash.v2 import NO_TOKEN, BlockDrafter
from sequoia_vllm.drafting.block_growth import LogitsAt


def markov_logits(
    base: Tensor, model: Any, drafted: Tensor | None, vocab_size: int, depth: int, tokens: Tensor
) -> Tensor:
    """`LogitsAt` of a level's position plus a bias by the node's token (DSpark).

    Args:
        base: ``[R, L, V']``: logits of each level over the tokens that the head drafts.
        drafted: int64 ``[V']``: the target's ids of these tokens; None: the same ids, perhaps
            more than the target has.
        vocab_size: V, of the target.
    """
    bias = model.markov_bias(model.markov_embed(tokens.flatten()))
    logits = (base[:, depth, None] + bias.view(*tokens.shape, -1)).flatten(0, 1)
    if drafted is None:
        return logits[:, :vocab_size]
    return logits.new_full((len(logits), vocab_size), NO_TOKEN).index_copy_(1, drafted, logits)


class MarkovDrafter(BlockDrafter):
    """A head whose Markov matrix corrects each level's prediction."""

    def allocate(self, target_model: torch.nn.Module) -> None:
        """See `TreeDrafter.allocate`; also maps the drafted tokens to the target's ids."""
        super().allocate(target_model)
        offsets = self.model.draft_id_to_target_id
        self._drafted_tokens = None
        if offsets is not None:
            self._drafted_tokens = torch.arange(len(offsets), device=offsets.device) + offsets

    @torch.inference_mode()
    def block_logits(self, hidden: Tensor, context: Tensor, roots: Tensor) -> LogitsAt:
        """See `BlockModel.block_logits`."""
        base = self.model.compute_draft_logits(hidden.flatten(0, 1))
        if (most := self.chains._draft_topk) is not None:
            values, indices = base.topk(most)
            base = torch.full_like(base, NO_TOKEN).scatter_(1, indices, values)
        base = base.view(*hidden.shape[:2], -1)
        return partial(markov_logits, base, self.model, self._drafted_tokens, self.vocab_size)
