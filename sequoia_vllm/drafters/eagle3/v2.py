"""Heads on Model Runner V2 that read tokens and states, in one pass per level."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.interfaces import supports_multimodal_embeddings

from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.runner.attention_layers import KEYS_ONLY, KeysAreWritten
from sequoia_vllm.engine.v2.drafting.drafter import DraftPass, HeadDrafter


class LevelHeadDrafter(HeadDrafter):
    """Reads each committed token with the target's states at the token before it.

    The row has that earlier token's position and slot, and predicts the token after the committed
    one. Drafted tokens come with the head's own recurrent states at their parents.

    While nothing is drafted, the pass of a one-layer head ends before its attention: the keys and
    values are written by then, and the states mean nothing.

    Where vLLM gives its own chains the embeddings of images, the head reads them, too.
    """

    _embeds = False

    def load(self, target_model: nn.Module, target_layers: set[str]) -> nn.Module:
        """See `TreeDrafter.load`."""
        model = super().load(target_model, target_layers)
        target: Any = self.chains.vllm_config.model_config
        self._embeds = target.supports_multimodal_inputs and supports_multimodal_embeddings(model)
        return model

    def run(self, rows: DraftPass) -> DraftStates:
        """See `TreeDrafter.run`."""
        if self.only_keys and rows.metadata is not None and len(rows.metadata) == 1:
            rows = replace(rows, metadata=dict.fromkeys(rows.metadata, KEYS_ONLY))
        try:
            states = self.run_model(
                rows, inputs_embeds=self._embedded(rows.token_ids), hidden_states=rows.states
            )
        except KeysAreWritten:
            return DraftStates(rows.token_ids)
        hidden, recurrent = states if isinstance(states, tuple) else (states, states)
        return DraftStates(hidden, recurrent)

    def _embedded(self, token_ids: Tensor) -> Tensor | None:
        """What stands for these tokens; None: the head embeds them.

        Never None for a head that takes images: vLLM compiles it once, for one kind of input.
        """
        if not self._embeds:
            return None
        images, self.images = self.images, None  # of the step's first pass, which reads
        embedded: Tensor = self.model.embed_input_ids(token_ids)
        return embedded if images is None else images.placed(embedded)
