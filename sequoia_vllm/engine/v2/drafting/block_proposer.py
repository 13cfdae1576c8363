"""Drafts trees with a DFlash head: one pass for all levels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from sequoia_vllm.drafting.block_growth import (
    BlockGrowth,
    BlockLogits,
    BlockModel,
    IndependentLogits,
)
from sequoia_vllm.drafting.growth import DraftQueries, DraftStates, TreeGrowth
from sequoia_vllm.engine.v2.drafting.ragged_rows import RaggedRows
from sequoia_vllm.engine.v2.drafting.state_proposer import StateTreeProposer


class BlockTreeProposer(StateTreeProposer, DFlashSpeculator, BlockModel):
    """Grows trees with vLLM's speculator of DFlash heads (loading, KV cache, buffers).

    From committed tokens such a head reads only the target's states. They become its own keys
    and values at their positions. One pass then predicts all levels. Its queries, the last
    committed token and a mask token per level, attend to these keys and to one another.

    Subclasses run heads that also use the tokens drafted above a node.
    """

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Loads vLLM's draft, and sets a request's queries by the levels of the tree."""
        super().load_model(target_model)
        self.num_query_per_req = self.tree.depth + (0 if self.sample_from_anchor else 1)
        names = self.model.get_draft_kv_cache_layer_names()
        causal = zip(names, self.model.get_draft_attn_causal(), strict=True)
        self._causal_layers = frozenset(name for name, is_causal in causal if is_causal)

    def _new_growth(self, **shared: Any) -> TreeGrowth:
        queries = self.tree.depth + 1
        self._chain = torch.ones(queries, queries, dtype=torch.bool, device=self.device).tril()
        return BlockGrowth(
            **shared,
            model=self,
            mask_token=self.parallel_drafting_token_id,
            root_predicts=self.sample_from_anchor,
            levels=self._levels_of_blocks(),
        )

    def _metadata_of(
        self, queries: DraftQueries, slots: Tensor, groups: dict[str, int]
    ) -> dict[str, Any]:
        """Masks the block as a chain in causal layers: no position sees a later one."""
        chain = {name: group for name, group in groups.items() if name in self._causal_layers}
        block = {name: group for name, group in groups.items() if name not in self._causal_layers}
        as_chain = replace(queries, ancestors=self._chain)
        return {
            **super()._metadata_of(queries, slots, block),
            **super()._metadata_of(as_chain, slots, chain),
        }

    def _levels_of_blocks(self) -> int | None:
        """See `BlockGrowth`."""
        return None

    @torch.inference_mode()
    def block_logits(self, hidden: Tensor, context: Tensor, roots: Tensor) -> BlockLogits:
        """See `BlockModel.block_logits`."""
        logits = self.compute_logits(hidden.flatten(0, 1))
        return IndependentLogits(logits.view(*hidden.shape[:2], -1))

    def _forward_ragged(self, batch: InputBatch, rows: RaggedRows) -> DraftStates:
        """Stores the context's keys and values; runs no forward."""
        states = self._ragged_states(rows)
        longest = self.draft_model_config.max_model_len - 1
        self.store_context(states, rows.positions.clamp(max=longest), rows.slots)
        return DraftStates(states)

    @torch.inference_mode()
    def store_context(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """See `BlockModel.store_context`."""
        names = self.model.get_draft_kv_cache_layer_names()
        by_layer = self._cache.by_layer(slots)
        self.model.precompute_and_store_context_kv(
            states, positions, [by_layer[name] for name in names]
        )

    @torch.inference_mode()
    def run_draft(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        recurrent_states: Tensor | None,
    ) -> DraftStates:
        """See `TreeSpeculator.run_draft`; dummy runs pass the target's states, too."""
        if metadata is None and recurrent_states is not None:
            self.model.precompute_and_store_context_kv(recurrent_states, positions)
        return DraftStates(self._run_head(token_ids, positions, metadata, slots))
