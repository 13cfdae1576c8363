"""vLLM's asynchronous scheduler with trees: who drafts, known a step ahead of the worker."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sequoia_vllm.engine.core.eligibility import may_carry_placeholders, reason_without_drafts
from sequoia_vllm.engine.core.scheduling import TreeScheduling

# At most this share of a step's requests, or one, carries placeholders: rows scored in vain.
_MOST_PADDED = 1 / 8


class TreeSchedulingAhead(TreeScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler with trees, but without drafts for requests that never draft.

    It runs a step ahead of the worker: vLLM gives every decoding request placeholders for the
    drafts that a step will grow. Our method takes them away from requests that never draft.

    A full CUDA graph needs equal numbers of drafts, so one request without drafts would take it
    from all others. While such requests are few, they keep placeholders, which the worker rejects.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Unfinished requests that never draft, and whether they may carry placeholders.
        self.without_drafts: dict[str, bool] = {}

    # Until: vLLM asks the speculative method which requests it drafts for.
    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Calls vLLM's, then takes placeholders away from requests that never draft."""
        self._remember(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        undrafted = self.without_drafts.keys() & scheduled.keys()
        if self.nobody_drafts or len(undrafted) == len(scheduled):
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)
        few = len(undrafted) <= max(1, len(scheduled) * _MOST_PADDED)
        others_draft = len(scheduled) > len(undrafted)
        is_padded = few and others_draft and all(self.without_drafts[name] for name in undrafted)
        if not (self.nobody_drafts or is_padded):
            for request_id in undrafted:
                self.requests[request_id].spec_token_ids = []

    def _remember(self, scheduler_output: Any) -> None:
        """Notes new requests that never draft; sampling parameters do not change later."""
        for request_id in scheduler_output.finished_req_ids:
            self.without_drafts.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self.without_drafts.pop(new.req_id, None)
            if reason_without_drafts(new.sampling_params):
                self.without_drafts[new.req_id] = may_carry_placeholders(new.sampling_params)
