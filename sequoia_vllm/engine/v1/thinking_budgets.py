"""Keeps vLLM's thinking budgets with the requests that have one."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder


def forget_stale_budgets(holder: ThinkingBudgetStateHolder, sampling_params: Sequence[Any]) -> None:
    """Removes budgets from the rows of requests that have none.

    vLLM keeps budgets by batch row. When a request ends, another one may move into its row. vLLM
    then leaves the budget in the row if the other request has none. The sampler would force the
    end of thinking on it, and on its neighbours where it has drafts.

    Args:
        sampling_params: Each request's `SamplingParams`, in batch order.
    """
    if not holder.has_tracked_requests():
        return
    rows = [row for row, p in enumerate(sampling_params) if p.thinking_token_budget is None]
    holder.sync_batch(BatchUpdate(len(sampling_params), removed=rows, added=(), moved=()))
