"""Trees drafted level by level by an EAGLE-3 head, or by the target's own MTP layer."""

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
    """Grows trees with a head that reads tokens and states, in a pass for each level.

    A row of such a head is a committed token with the target's states at the token before it. The
    row has that earlier token's position and slot, and predicts the token after the committed
    one. Drafted tokens come with the recurrent states of the head itself at their parents.

    Where nothing is drafted, a head of one layer ends at its attention. Keys and values of a row
    depend on nothing behind it: neither on the context, nor on the layer's MLP.
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
        """See `TreeSpeculator.run_draft`; whatever states where only keys are read for."""
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
    """vLLM's speculator of EAGLE-3 heads (loading, KV cache, buffers) growing trees."""


class LayerTreeProposer(_LevelTreeProposer, MTPSpeculator):
    """vLLM's speculator of MTP layers (loading, KV cache, buffers) growing trees.

    Such a layer reads the target's last states, as wide as its own, and nothing combines them.
    """

    def _layers_read(self, target_model: torch.nn.Module) -> int:
        return 1

    def _states_read(self, last: Tensor, auxiliary: list[Tensor] | None) -> list[Tensor]:
        return [last]

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.combine_hidden_states`."""
        return target_states
