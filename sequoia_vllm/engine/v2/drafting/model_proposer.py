"""Drafts trees with a standalone model, which reads only tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from sequoia_vllm.drafting.draft_plan import depths_by_drafts
from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.runner.vocabulary import draft_vocabulary
from sequoia_vllm.engine.v2.drafting.draft_progress import ModelDraftProgress
from sequoia_vllm.engine.v2.drafting.proposer import TreeProposerV2


class ModelTreeProposer(TreeProposerV2, StandaloneARSpeculator):
    """Grows trees with vLLM's draft-model speculator (loading, KV cache, buffers).

    Its inputs and outputs are the target's tokens, also if the draft has another vocabulary.
    """

    def allocate(self, target_model: torch.nn.Module) -> None:
        """See `TreeSpeculator.allocate`; also matches the vocabularies."""
        super().allocate(target_model)
        self._vocabulary = draft_vocabulary(self.vllm_config, self.model, self.device)

    def _new_progress(self, steps_ahead: int) -> ModelDraftProgress:
        return ModelDraftProgress(
            self.max_num_reqs,
            depths_by_drafts(self.tree),
            unknown_drafts=steps_ahead * self.tree.num_speculative_tokens,
            device=self.device,
        )

    def _slot_mappings(self) -> Tensor:
        return self.expanded_slot_mappings

    def _reads_without_drafting(self, batch: InputBatch, reads: NDArray[np.bool_]) -> bool:
        """True for prompts of drafts with sliding windows: see `leave_out_before_windows`."""
        return bool(self._cache.windows and (batch.is_prefilling_np & reads).any())

    def run_draft(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        recurrent_states: Tensor | None,
    ) -> DraftStates:
        """See `TreeSpeculator.run_draft`."""
        own_ids = self._vocabulary.read(token_ids)
        return DraftStates(self._run_model(own_ids, positions, metadata, slots, None))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `TreeSpeculator.compute_logits`."""
        return self._vocabulary.target_logits(self.model.compute_logits(hidden))
