"""Trees drafted by an EAGLE-3 head, level by level."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.v2.state_proposer import StateTreeProposer


class HeadTreeProposer(StateTreeProposer, EagleSpeculator):
    """vLLM's speculator of EAGLE-3 heads (loading, KV cache, buffers) growing trees.

    A row of such a head is a committed token with the target's states at the token before it:
    it has that one's position and slot, and what it computes predicts the token after. Drafted
    tokens come with what the head itself fed back for their parents.
    """

    @torch.inference_mode()
    def run_draft(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        feedback: Tensor | None,
    ) -> DraftStates:
        """See `TreeProposer.run_draft`."""
        rows = len(token_ids)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=rows,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=rows),
        ):
            hidden, fed_back = self.model(
                input_ids=token_ids, positions=positions, hidden_states=feedback, inputs_embeds=None
            )
        return DraftStates(hidden, fed_back)
