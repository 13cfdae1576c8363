"""Scheduling on Model Runner V2: requests that cannot use a tree are scheduled without drafts."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sequoia_vllm.engine.eligibility import drafts_at_no_time


class TreeScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, which assumes as many drafts for every request."""

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """As vLLM's; then takes away drafts that the worker would have to reject."""
        super()._update_after_schedule(scheduler_output)
        nobody_drafts = bool(self.vllm_config.model_config.logits_processors)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if nobody_drafts or drafts_at_no_time(request.sampling_params):
                request.spec_token_ids = []
