"""Thinking budgets on tree nodes of Model Runner V2: each node by the tokens of its own path."""

from dataclasses import replace

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from sequoia_vllm.verification.thinking_budgets import Markers, NodeTexts, forced_tokens

_FORCED = 1.0e9  # vLLM's logit of a token that has to come


class PathBudgets:
    """Replaces vLLM's state of budgets, which takes the rows before a node for its history.

    It still keeps the requests' budgets, and where committed tokens last began and ended thinking.
    What a node forces is told by the rule of vLLM's kernel.

    Until: vLLM's sampler is told each row's history.

    Args:
        parents: int32 ``[N]``, or ``[S, N]`` by slot: of each node; the root's is not read.
        ancestors: bool ``[N, N]``, or ``[S, N, N]``: which nodes each sees, itself included.
    """

    def __init__(self, state: ThinkingBudgetState, parents: Tensor, ancestors: Tensor) -> None:
        self._state, self._parents, self._ancestors = state, parents, ancestors
        self.add_request = state.add_request
        self.apply_staged_writes = state.apply_staged_writes

    def apply(self, logits: Tensor, context: LogitsContext) -> None:
        """Replaces the state's `apply`: changes float32 logits ``[T, V]`` in place."""
        state = self._state
        if not state.enabled or not state.use_thinking_budget[context.idx_mapping_np].any():
            return
        # Looks through the committed tokens. It forces nothing in rows that are thrown away.
        roots = context.idx_mapping
        state.apply(
            logits.new_empty(len(roots), logits.shape[1]),
            replace(
                context, expanded_idx_mapping=roots, expanded_local_pos=torch.zeros_like(roots)
            ),
        )
        slots = context.expanded_idx_mapping.long()
        texts = NodeTexts(
            slots=slots,
            nodes=context.expanded_local_pos.long(),
            tokens=context.input_ids,
            lengths=context.pos.long() + 1,
            committed=state.req_states.all_token_ids.gpu,
            num_committed=state.req_states.total_len.gpu,
            parents=self._parents,
            ancestors=self._ancestors,
        )
        markers = Markers(
            start=state.reasoning_start_token_ids,
            natural_end=state.natural_reasoning_end_token_ids,
            forced_end=state.reasoning_end_token_ids,
        )
        forces, tokens = forced_tokens(
            texts, markers, state.thinking_token_budget.gpu[slots].long(),
            state.cached_last_start[slots].long(), state.cached_last_end[slots].long(),
        )  # fmt: skip
        tokens = tokens[:, None]
        logits.scatter_(1, tokens, logits.gather(1, tokens).masked_fill(forces[:, None], _FORCED))
