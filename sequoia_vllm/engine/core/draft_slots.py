"""Bounds KV cache slots of requests: for the drafts of a step, not of the largest tree.

A step's allocation covers the two trees that it writes. It scores one, which counts among the
step's tokens. It grows the next one in look-ahead slots behind. vLLM looks up the drafts of the
next tree after the allocation, when it knows how many requests it could schedule. So we bound the
number before, by the requests that run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core.adapting import adapter_of
from sequoia_vllm.engine.core.eligibility import has_custom_processors, never_drafts
from sequoia_vllm.engine.core.grammar import thinks_first


class DraftsAtMost:
    """A table of drafts by batch size, cut to what there are slots for.

    Args:
        drafts: At batch sizes 0 (not used), 1, 2, ...; it may change.
        most: Drafts.
    """

    def __init__(self, drafts: list[int], most: int) -> None:
        self._drafts = drafts
        self._most = most

    def __getitem__(self, batch_size: int) -> int:
        return min(self._drafts[batch_size], self._most)


def schedule(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Schedules like vLLM, with slots for the drafts of this batch and no more drafts than those.

    The batch may be smaller than expected, for example while a request's last token is under way.
    In that step it drafts no more than a batch of all running requests. A step none of whose
    requests ever drafts is scheduled, and measured, as one without drafts.
    """
    if self.dynamic_sd_lookup is None or not SequoiaSettings.enabled(self.vllm_config):
        return original(self, *args, **kwargs)
    if (adapter := adapter_of(self)) is not None:
        adapter.before_step(time.perf_counter(), self.reset_preempted_req_ids)
    lookup, slots = self.dynamic_sd_lookup, self.num_lookahead_tokens
    most = _most_drafts(self)
    self.dynamic_sd_lookup = DraftsAtMost(lookup, most)
    self.num_lookahead_tokens = _slots_for(self, most)
    try:
        scheduled = original(self, *args, **kwargs)
    finally:
        self.dynamic_sd_lookup, self.num_lookahead_tokens = lookup, slots
    if scheduled.num_spec_tokens_to_schedule > 0 and not some_draft(self, scheduled):
        scheduled.num_spec_tokens_to_schedule = 0
    return scheduled


def some_draft(scheduler: Any, scheduled: Any) -> bool:
    """Whether one of the scheduled requests may ever draft."""
    if has_custom_processors(scheduler.vllm_config):
        return False
    thinks = thinks_first(scheduler.vllm_config)
    return any(
        not never_drafts(scheduler.requests[request].sampling_params, thinks)
        for request in scheduled.num_scheduled_tokens
    )


def handle_stopped_request(original: Callable[..., bool], self: Any, request: Any) -> bool:
    """Stops a request as vLLM does, and lets a session's next turn begin where plain vLLM's does.

    The last step may have accepted tokens behind the turn's end. vLLM would write the next turn
    behind their slots. Plain vLLM never computes the last token that it emits: the next turn
    begins in that token's slot, and so it does here.
    """
    if request.resumable and SequoiaSettings.enabled(self.vllm_config):
        known = request.num_tokens - 1 + request.num_output_placeholders
        request.num_computed_tokens = min(request.num_computed_tokens, known)
    return original(self, request)


def _most_drafts(scheduler: Any) -> int:
    """The most drafts of any batch: all running requests, and none to all of the waiting ones.

    Few requests get many drafts. So while few run, each request that joins reserves slots for as
    many; its own tokens fill them later.
    """
    running, waiting = scheduler.get_request_counts()
    largest = min(running + waiting, scheduler.max_num_running_reqs)
    return max(scheduler.dynamic_sd_lookup[max(running, 1) : largest + 1], default=0)


def _slots_for(scheduler: Any, drafts: int) -> int:
    """Look-ahead slots of a step that grows trees of so many drafts."""
    beyond: int = scheduler.num_lookahead_tokens - scheduler.num_spec_tokens
    if beyond and drafts > 0:
        # A head that drafts blocks reads a root and masks. Some heads read masks for all levels
        # of the engine's tree, however little of it is drafted.
        drafts = max(drafts, SequoiaSettings.of(scheduler.vllm_config).tree.depth)
    return drafts + beyond
