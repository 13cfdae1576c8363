"""Drafts trees with relatives of DFlash heads that correct a block by the tokens drafted in it.

One pass predicts every level. In vLLM's chains the head then corrects each prediction by the
token before it. In trees this is the node's own token. Q at the node is exactly the distribution
from which the chain would draw its next token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

from sequoia_vllm.drafting.block_growth import BlockLogits
from sequoia_vllm.engine.v2.drafting.block_proposer import BlockTreeProposer

_NONE = float("-inf")


class MarkovLogits(BlockLogits):
    """Logits of a level's position plus a bias by the node's token (DSpark).

    Args:
        base: ``[R, L, V']``: logits of each level over the tokens that the head drafts.
        model: vLLM's.
        drafted: int64 ``[V']``: the target's ids of these tokens; None: the same ids, perhaps
            more than the target has.
        vocab_size: V, of the target.
    """

    def __init__(self, base: Tensor, model: Any, drafted: Tensor | None, vocab_size: int) -> None:
        self._base = base
        self._model = model
        self._drafted = drafted
        self._vocab_size = vocab_size

    def at(self, depth: int, tokens: Tensor) -> Tensor:
        """See `BlockLogits.at`."""
        bias = self._model.markov_bias(self._model.markov_embed(tokens.flatten()))
        base = self._base[:, depth, None]
        logits = (base + bias.view(*tokens.shape, -1)).flatten(0, 1)
        if self._drafted is None:
            return logits[:, : self._vocab_size]
        whole = logits.new_full((len(logits), self._vocab_size), _NONE)
        return whole.index_copy_(1, self._drafted, logits)


class CandidateLogits(BlockLogits):
    """Logits from scores of candidate pairs of neighbouring levels (DFlash2, LiLiCorr).

    A token that is no candidate, and so had probability 0, gets the scores after the best one.

    Args:
        candidates: int64 ``[R, L, K]``: each level's candidates, best first.
        scores: ``[R, L, K, K]``: score of each candidate (last axis) after each candidate of the
            level above; on the first level all K rows are equal.
        vocab_size: V.
        dtype: Type of the logits.
    """

    def __init__(
        self, candidates: Tensor, scores: Tensor, vocab_size: int, dtype: torch.dtype
    ) -> None:
        self._candidates = candidates
        self._scores = scores.to(dtype)
        self._vocab_size = vocab_size

    def at(self, depth: int, tokens: Tensor) -> Tensor:
        """See `BlockLogits.at`."""
        num_reqs, nodes = tokens.shape
        number = self._candidates.shape[2]
        scores = self._scores[:, depth]
        if depth > 0:
            above = self._candidates[:, depth - 1, None]
            rank = (above == tokens[..., None]).int().argmax(dim=2)
            scores = scores.gather(1, rank[..., None].expand(-1, -1, number))
        else:
            scores = scores[:, :1]
        logits = scores.new_full((num_reqs, nodes, self._vocab_size), _NONE)
        own = self._candidates[:, depth, None].expand(-1, nodes, -1)
        return logits.scatter_(2, own, scores).flatten(0, 1)


class MarkovTreeProposer(BlockTreeProposer, DSparkSpeculator):
    """Grows trees with vLLM's speculator of DSpark drafters."""

    def allocate(self, target_model: torch.nn.Module) -> None:
        """See `TreeSpeculator.allocate`; also maps the drafted tokens to the target's ids."""
        super().allocate(target_model)
        offsets = self.model.draft_id_to_target_id
        self._drafted_tokens = None
        if offsets is not None:
            self._drafted_tokens = torch.arange(len(offsets), device=offsets.device) + offsets

    @torch.inference_mode()
    def block_logits(self, hidden: Tensor, context: Tensor, roots: Tensor) -> BlockLogits:
        """See `BlockModel.block_logits`."""
        base = self.model.compute_draft_logits(hidden.flatten(0, 1))
        if self._draft_topk is not None:
            values, indices = base.topk(self._draft_topk)
            base = torch.full_like(base, _NONE).scatter_(1, indices, values)
        base = base.view(*hidden.shape[:2], -1)
        return MarkovLogits(base, self.model, self._drafted_tokens, self._logits_size)


class CandidateTreeProposer(BlockTreeProposer, DFlash2Speculator):
    """Grows trees with vLLM's speculator of DFlash2 heads.

    Their layers mix a block's positions with earlier ones, and are built for one block size. So
    every block has as many levels as the whole tree.
    """

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Loads as vLLM does, for chains as long as the tree is deep."""
        with _drafts(self.vllm_config.speculative_config, self.tree.depth):
            return super().load_draft_model(target_model, target_attn_layer_names)

    def _levels_of_blocks(self) -> int | None:
        return self.tree.depth

    def _least_rows(self) -> int:
        return self.tree.depth + 1

    @torch.inference_mode()
    def block_logits(self, hidden: Tensor, context: Tensor, roots: Tensor) -> BlockLogits:
        """See `BlockModel.block_logits`."""
        candidates, unary = self.model.compute_candidates(hidden.flatten(0, 1))
        candidates = candidates.view(*hidden.shape[:2], -1)
        scores = self._scores_of(candidates, unary.view_as(candidates), hidden, context, roots)
        dtype = self.draft_model_config.head_dtype
        return CandidateLogits(candidates, scores, self._logits_size, dtype)

    def _scores_of(
        self, candidates: Tensor, unary: Tensor, hidden: Tensor, context: Tensor, roots: Tensor
    ) -> Tensor:
        """``[R, L, K, K]``: see `CandidateLogits`."""
        return self.model.model.candidate_selector(candidates, unary, hidden, roots[:, 0])


class LatticeTreeProposer(CandidateTreeProposer, LiLiCorrSpeculator):
    """Grows trees with vLLM's speculator of LiLiCorr heads; a pass scores the candidates."""

    def _scores_of(
        self, candidates: Tensor, unary: Tensor, hidden: Tensor, context: Tensor, roots: Tensor
    ) -> Tensor:
        """See `CandidateTreeProposer`."""
        head = self.model.model
        is_there = torch.ones(len(context), dtype=torch.bool, device=context.device)
        return head.lilicorr(
            self.target_embeddings(candidates), unary, hidden, head.hidden_norm(context), is_there
        )


@contextmanager
def _drafts(speculative_config: Any, drafts: int) -> Iterator[None]:
    """Makes vLLM see this number of drafts per request within the block."""
    nodes = speculative_config.num_speculative_tokens
    speculative_config.num_speculative_tokens = drafts
    try:
        yield
    finally:
        speculative_config.num_speculative_tokens = nodes
