"""Heads on Model Runner V2 that read tokens and states, in one pass per level."""

from dataclasses import replace

from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.runner.attention_layers import KEYS_ONLY, KeysAreWritten
from sequoia_vllm.engine.v2.drafting.drafter import DraftPass, HeadDrafter


class LevelHeadDrafter(HeadDrafter):
    """Reads each committed token with the target's states at the token before it.

    The row has that earlier token's position and slot, and predicts the token after the committed
    one. Drafted tokens come with the head's own recurrent states at their parents.

    While nothing is drafted, the pass of a one-layer head ends before its attention: the keys and
    values are written by then, and the states mean nothing.
    """

    def run(self, rows: DraftPass) -> DraftStates:
        """See `TreeDrafter.run`."""
        if self.only_keys and rows.metadata is not None and len(rows.metadata) == 1:
            rows = replace(rows, metadata=dict.fromkeys(rows.metadata, KEYS_ONLY))
        try:
            states = self.run_model(rows, inputs_embeds=None, hidden_states=rows.states)
        except KeysAreWritten:
            return DraftStates(rows.token_ids)
        hidden, recurrent = states if isinstance(states, tuple) else (states, states)
        return DraftStates(hidden, recurrent)
