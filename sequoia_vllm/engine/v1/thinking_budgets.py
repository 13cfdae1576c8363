"""Thinking budgets on tree nodes: what vLLM's V1 state would force after each node's own path.

vLLM's state of a budget goes forward one step at a time, by the tokens that the step emitted. Here
it goes forward by one token at a time, as without drafts. Nodes have copies of it. So the rule is
vLLM's own. Model Runner V2 has another one (`verification.thinking_budgets`).
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from sequoia_vllm.step.paths import drafted_nodes
from sequoia_vllm.step.score import StepState


class _Budget:
    """One request's budget: vLLM's holder, as of a batch with this request alone.

    Args:
        holder: vLLM's, or that of the node above.
        state: The request's.
        known: Steps that it has seen: outputs of so many tokens, beginning with none.
    """

    def __init__(self, holder: ThinkingBudgetStateHolder, state: Any, known: int) -> None:
        self._holder, self._known = copy(holder), known
        self._holder.in_spec_mode = False  # each step has one row of logits
        self._holder.cu_num_tokens = {}
        # vLLM replaces what a state holds, and never changes it in place.
        self._holder._state = {0: dict(state)}

    @classmethod
    def of(cls, holder: ThinkingBudgetStateHolder, request: Any) -> "_Budget":
        """The budget of a request that begins."""
        own = cls(holder, {}, 0)
        added: list[Any] = [(0, request.sampling_params, request.prompt_token_ids, [])]
        own._holder.sync_batch(BatchUpdate(1, removed=(), added=added, moved=()))
        return own

    def advance(self, output: Sequence[int]) -> None:
        """Takes what was generated since, token by token; ``output`` is all of it."""
        for known in range(self._known, len(output) + 1):
            self._holder.update_state([list(output[:known])], None)
        self._known = len(output) + 1

    def below(self, output: Sequence[int]) -> "_Budget":
        """The budget once this is the output."""
        child = _Budget(self._holder, self._holder._state[0], self._known)
        child.advance(output)
        return child

    def may_force(self, tokens: Sequence[int], depth: int) -> bool:
        """Whether anything may be forced at the root, or below it in a tree of these drafts."""
        state = self._holder._state[0]
        if state["in_end"]:
            return True
        if state["start_thinking"] >= 0:
            return bool(state["check_count_down"] <= depth + 1)
        starts = not set(self._holder.think_start_token_ids).isdisjoint(tokens)
        return starts and bool(state["thinking_token_budget"] <= depth + 1)

    def force(self, logits: Tensor) -> None:
        """Forces what has to come next, in place, in a row of logits ``[1, V]``."""
        self._holder.apply_to_logits(logits, False, None)


class ThinkingBudgets:
    """What the sampler gets for vLLM's holder of a batch's budgets, and what forces tree nodes.

    Budgets stay with their requests. vLLM's stay with rows of the batch: when a request ends,
    another one without a budget may move into its row, and would be forced to end its thinking.
    """

    def __init__(self, holder: ThinkingBudgetStateHolder) -> None:
        self._holder = holder
        self._of_requests: dict[str, _Budget] = {}
        self._rows: dict[int, tuple[_Budget, list[int]]] = {}  # and what each has generated

    def forget(self, request_id: str) -> None:
        """The request has ended, or begins anew."""
        self._of_requests.pop(request_id, None)

    def follow(self, requests: Sequence[Any]) -> None:
        """Notes the batch's requests, vLLM's `CachedRequestState` in order, and what they said."""
        self._rows = {}
        for row, request in enumerate(requests):
            if request.sampling_params.thinking_token_budget is not None:
                budget = self._of_requests.get(request.req_id)
                if budget is None:
                    budget = _Budget.of(self._holder, request)
                    self._of_requests[request.req_id] = budget
                budget.advance(request.output_token_ids)
                self._rows[row] = budget, request.output_token_ids

    def has_tracked_requests(self) -> bool:
        """Replaces the holder's method: whether a request of the batch has a budget."""
        return bool(self._rows)

    def update_state(self, *_args: Any, **_kwargs: Any) -> None:
        """Replaces the holder's method; `follow` was told all."""

    def apply_to_logits(self, logits: Tensor, *_args: Any) -> Tensor:
        """Replaces the holder's method: forces tokens in place, in one row for each request."""
        for row, (budget, _) in self._rows.items():
            budget.force(logits[row : row + 1])
        return logits

    def force_nodes(self, logits: Tensor, trees: StepState) -> Tensor:
        """Forces tokens after nodes of trees.

        Args:
            logits: ``[rows, V]``, any float dtype; not changed.

        Returns:
            float32 ``[rows, V]``; ``logits`` itself where nothing can be forced.
        """
        own = logits
        for place, row in enumerate(trees.requests.tolist()):
            if row not in self._rows:
                continue
            budget, output = self._rows[row]
            nodes = drafted_nodes(trees, place)
            deepest = max((depth for _, depth, _ in nodes), default=0)
            if not budget.may_force([token for *_, token in nodes], deepest):
                continue
            if own is logits:
                own = logits.to(torch.float32, copy=True)
            first = int(trees.first_logits_row[place])
            budgets, outputs = [budget], [list(output)]
            budget.force(own[first : first + 1])
            if trees.drafts[place] is None:  # no node can be accepted
                continue
            for node, (parent, _, token) in enumerate(nodes, start=1):
                outputs.append([*outputs[parent], token])
                budgets.append(budgets[parent].below(outputs[node]))
                budgets[node].force(own[first + node : first + node + 1])
        return own
