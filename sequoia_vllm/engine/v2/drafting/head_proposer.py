"""Drafts trees level by level with an EAGLE-3 head, or with the target's own MTP layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.runner.attention_layers import KEYS_ONLY, KeysAreWritten
from sequoia_vllm.engine.v2.drafting.state_proposer import StateTreeProposer


class _LevelTreeProposer(StateTreeProposer):
    """Grows trees with a head that reads tokens and states, in one pass per level.

    The head reads each committed token with the target's states at the token before it. The row
    has that earlier token's position and slot, and predicts the token after the committed one.
    Drafted tokens come with the head's own recurrent states at their parents.

    While nothing is drafted, the pass of a one-layer head ends before its attention: the keys and
    values are written by then.
    """

    @torch.inference_mode()
    def run_draft(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        recurrent_states: Tensor | None,
    ) -> DraftStates:
        """See `TreeSpeculator.run_draft`; the states mean nothing after a pass for keys only."""
        if self._only_keys and metadata is not None and len(metadata) == 1:
            metadata = dict.fromkeys(metadata, KEYS_ONLY)
        try:
            states = self._run_head(
                token_ids, positions, metadata, slots, hidden_states=recurrent_states
            )
        except KeysAreWritten:
            return DraftStates(token_ids)
        hidden, recurrent = states if isinstance(states, tuple) else (states, states)
        return DraftStates(hidden, recurrent)


class HeadTreeProposer(_LevelTreeProposer, EagleSpeculator):
    """Grows trees with vLLM's speculator of EAGLE-3 heads (loading, KV cache, buffers)."""


class LayerTreeProposer(_LevelTreeProposer, MTPSpeculator):
    """Grows trees with vLLM's speculator of MTP layers (loading, KV cache, buffers).

    Such a layer reads the target's last states as they are: they have its own width.
    """

    def _layers_read(self, target_model: torch.nn.Module) -> int:
        return 1

    def _states_read(self, last: Tensor, auxiliary: list[Tensor] | None) -> list[Tensor]:
        return [last]

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.combine_hidden_states`."""
        return target_states
