"""DFlash heads on Model Runner V2, and their kin DFlash2 and LiLiCorr.

In chains DFlash2 and LiLiCorr correct each prediction by the token before it. In trees this is
the node's own token: Q at the node is what the chain would draw its next token from.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.drafting.block_growth import BlockGrowth, BlockModel, LogitsAt
from sequoia_vllm.drafting.growth import DraftQueries, DraftStates, TreeGrowth, chain_ancestors
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.v2.drafting.drafter import DraftPass, HeadDrafter

NO_TOKEN = float("-inf")
"""The logit of a token that is never drafted."""


class BlockDrafter(HeadDrafter, BlockModel):
    """Drafts all levels in one pass.

    From committed tokens such a head reads only the target's states. They become its own keys
    and values at their positions. One pass then predicts all levels. Its queries, the last
    committed token and a mask token per level, attend to these keys and to one another.
    """

    levels: int | None = None
    """Levels of every block, see `BlockGrowth`."""

    @property
    def queries_per_request(self) -> int:
        """By the levels of the tree, not by its nodes."""
        return self.tree.depth + (0 if self.chains.sample_from_anchor else 1)

    def allocate(self, target_model: torch.nn.Module) -> None:
        """Prepares the masks of blocks."""
        names = self.model.get_draft_kv_cache_layer_names()
        causal = zip(names, self.model.get_draft_attn_causal(), strict=True)
        self._causal_layers = frozenset(name for name, is_causal in causal if is_causal)
        self._chain = chain_ancestors(self.tree.depth + 1, self.chains.device)

    def new_growth(self, **shared: Any) -> TreeGrowth:
        """See `TreeDrafter.new_growth`."""
        return BlockGrowth(
            **shared,
            model=self,
            mask_token=self.chains.parallel_drafting_token_id,
            root_predicts=self.chains.sample_from_anchor,
            levels=self.levels,
        )

    def metadata_of(self, queries: DraftQueries, groups: dict[str, int]) -> dict[str, Any]:
        """Masks the block as a chain in causal layers: no position sees a later one."""
        chain = {name: group for name, group in groups.items() if name in self._causal_layers}
        block = {name: group for name, group in groups.items() if name not in self._causal_layers}
        as_chain = replace(queries, ancestors=self._chain)
        return {**super().metadata_of(queries, block), **super().metadata_of(as_chain, chain)}

    @torch.inference_mode()
    def block_logits(self, hidden: Tensor, context: Tensor, roots: Tensor) -> LogitsAt:
        """See `BlockModel.block_logits`."""
        logits = self.compute_logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

        def of_level(depth: int, tokens: Tensor) -> Tensor:
            """The same at all nodes of a level, whatever tokens lie above."""
            shape = (*tokens.shape, logits.shape[2])
            return logits[:, depth, None].expand(shape).reshape(-1, shape[2])

        return of_level

    @torch.inference_mode()
    def store_context(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """See `BlockModel.store_context`."""
        names = self.model.get_draft_kv_cache_layer_names()
        by_layer = self.cache.by_layer(slots)
        self.model.precompute_and_store_context_kv(
            states, positions, [by_layer[name] for name in names]
        )

    @torch.inference_mode()
    def run(self, rows: DraftPass) -> DraftStates:
        """See `TreeDrafter.run`; dummy runs pass the target's states, too."""
        if rows.metadata is None and rows.states is not None:
            self.model.precompute_and_store_context_kv(rows.states, rows.positions)
        return DraftStates(self.run_model(rows, inputs_embeds=None))


def candidate_logits(
    candidates: Tensor, scores: Tensor, vocab_size: int, depth: int, tokens: Tensor
) -> Tensor:
    """`LogitsAt` from scores of candidate pairs of neighbouring levels (DFlash2, LiLiCorr).

    A token that is no candidate, and so had probability 0, gets the scores after the best one.

    Args:
        candidates: int64 ``[R, L, K]``: each level's candidates, best first.
        scores: ``[R, L, K, K]``: score of each candidate (last axis) after each candidate of the
            level above; on the first level all K rows are equal.
        vocab_size: V.
    """
    num_reqs, nodes = tokens.shape
    own, scores = candidates[:, depth, None], scores[:, depth]
    if depth > 0:
        above = candidates[:, depth - 1, None]
        rank = (above == tokens[..., None]).int().argmax(dim=2)
        scores = scores.gather(1, rank[..., None].expand(-1, -1, candidates.shape[2]))
    else:
        scores = scores[:, :1]
    logits = scores.new_full((num_reqs, nodes, vocab_size), NO_TOKEN)
    return logits.scatter_(2, own.expand(-1, nodes, -1), scores).flatten(0, 1)


class CandidateDrafter(BlockDrafter):
    """A DFlash2 head, or a LiLiCorr head: a pass of its own scores the candidates.

    Their layers mix a block's positions with earlier ones, and are built for one block size. So
    every block has as many levels as the whole tree.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.levels = self.tree.depth
        self.least_rows = self.tree.depth + 1

    def load(self, target_model: torch.nn.Module, target_layers: set[str]) -> torch.nn.Module:
        """Loads for chains as long as the tree is deep."""
        config = self.chains.speculative_config
        with patched(config, "num_speculative_tokens", self.tree.depth):
            return super().load(target_model, target_layers)

    @torch.inference_mode()
    def block_logits(self, hidden: Tensor, context: Tensor, roots: Tensor) -> LogitsAt:
        """See `BlockModel.block_logits`."""
        candidates, unary = self.model.compute_candidates(hidden.flatten(0, 1))
        candidates = candidates.view(*hidden.shape[:2], -1)
        unary, head = unary.view_as(candidates), self.model.model
        if hasattr(head, "lilicorr"):
            embedded = self.chains.target_embeddings(candidates)
            is_there = torch.ones(len(context), dtype=torch.bool, device=context.device)
            anchors = head.hidden_norm(context)
            scores = head.lilicorr(embedded, unary, hidden, anchors, is_there)
        else:
            scores = head.candidate_selector(candidates, unary, hidden, roots[:, 0])
        dtype = self.chains.draft_model_config.head_dtype
        return partial(candidate_logits, candidates, scores.to(dtype), self.vocab_size)
