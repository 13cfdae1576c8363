"""Thinking budgets on tree nodes of Model Runner V2: each node by the tokens of its own path."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

_FORCED = 1.0e9  # vLLM's logit of a token that has to come


class PathBudgets:
    """Replaces vLLM's state of budgets, which takes the rows before a node for its history.

    It still keeps the requests' budgets, and where committed tokens last began and ended thinking.
    What a node forces is told by the same rule as vLLM's kernel has. Waits for nothing on the
    device.

    Until: vLLM's sampler is told each row's history.

    Args:
        parents: int32 ``[N]``, or ``[S, N]`` by slot: of each node; the root's is not read.
        ancestors: bool ``[N, N]``, or ``[S, N, N]``: which nodes each sees, itself included.
    """

    def __init__(self, state: ThinkingBudgetState, parents: Tensor, ancestors: Tensor) -> None:
        self._state, self._parents, self._ancestors = state, parents, ancestors
        self._is_by_slot = parents.ndim == 2
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
        slots, nodes = context.expanded_idx_mapping.long(), context.expanded_local_pos.long()
        first = torch.arange(len(slots), device=slots.device) - nodes
        start, natural_end, end = (
            state.reasoning_start_token_ids,
            state.natural_reasoning_end_token_ids,
            state.reasoning_end_token_ids,
        )
        longest = max(len(start), len(natural_end), len(end) - 1)
        behind = self._tokens_behind(slots, nodes, first, context.input_ids, longest)
        lengths = context.pos.long() + 1  # tokens that each node sees
        last_start = torch.maximum(
            self._last(behind, start, nodes, slots, first, lengths),
            state.cached_last_start[slots].long(),
        )
        last_end = torch.maximum(
            self._last(behind, natural_end, nodes, slots, first, lengths),
            state.cached_last_end[slots].long(),
        )
        budgets = state.thinking_token_budget.gpu[slots].long()
        thinks = (budgets >= 0) & (last_start >= 0) & (last_start > last_end)
        forces = thinks & (lengths - last_start - len(start) >= budgets)
        said = torch.zeros_like(slots)  # tokens of the forced end that are there already
        for count in range(1, len(end)):
            said = torch.where(_end_in(behind, end[:count]), count, said)
        forced = end[said].long()[:, None]
        logits.scatter_(1, forced, logits.gather(1, forced).masked_fill(forces[:, None], _FORCED))

    def _tokens_behind(
        self, slots: Tensor, nodes: Tensor, first: Tensor, input_ids: Tensor, count: int
    ) -> list[Tensor]:
        """The last tokens that each node sees, backwards from its own: int ``[T]`` each, or -1."""
        states = self._state.req_states
        every, place = states.all_token_ids.gpu, states.total_len.gpu[slots].long() - 1
        found, at = [input_ids], nodes
        for _ in range(count - 1):
            on_path = at > 0
            place = torch.where(on_path, place, place - 1)
            above = self._of(self._parents, slots, at).long()
            at = torch.where(on_path, above, at)
            token = torch.where(at > 0, input_ids[first + at], every[slots, place.clamp(min=0)])
            found.append(token.masked_fill(place < 0, -1))
        return found

    def _last(
        self, behind: list[Tensor], marker: Tensor, nodes: Tensor, slots: Tensor, first: Tensor,
        lengths: Tensor,
    ) -> Tensor:  # fmt: skip
        """Where the last of these markers begins that ends on each node's path; -1: there is none.

        Int64 ``[T]``.
        """
        begins = torch.where(_end_in(behind, marker), lengths - len(marker), -1)
        above = self._of(self._ancestors, slots, nodes)
        rows = first[:, None] + torch.arange(above.shape[1], device=slots.device)
        return begins[rows.clamp(max=len(slots) - 1)].masked_fill(~above, -1).amax(dim=1)

    def _of(self, table: Tensor, slots: Tensor, nodes: Tensor) -> Tensor:
        return table[slots, nodes] if self._is_by_slot else table[nodes]


def _end_in(behind: list[Tensor], marker: Tensor) -> Tensor:
    """Whether what each node sees ends in these tokens, bool ``[T]``."""
    found: Any = True
    for token, expected in zip(behind, marker.flip(0), strict=False):
        found = found & (token == expected)
    return found
