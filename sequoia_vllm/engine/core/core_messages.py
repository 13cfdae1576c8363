"""Saves messages between the engine core and its workers, where it takes one step at a time.

vLLM's engine core then sends three per step, and waits for each answer: run the target, sample,
and say which tokens were drafted. Here the first message also samples, unless the engine core
must add masks of grammars. The drafts come with the sampled tokens.

Where the engine core works a step ahead ("asynchronous scheduling") nothing waits, and nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.outputs import DraftTokenIds

_DRAFTS = "sequoia_drafts"  # set on the ModelRunnerOutput of a step
_BROUGHT = "_sequoia_drafts_brought"  # set on a scheduler until the step's end


# -- in the worker -----------------------------------------------------------------------


def attach_drafts(output: Any, drafts: DraftTokenIds | None) -> Any:
    """``output`` of a model runner's step, carrying what was drafted in it."""
    setattr(output, _DRAFTS, drafts or DraftTokenIds(req_ids=[], draft_token_ids=[]))
    return output


# -- in the engine core --------------------------------------------------------------------


def keep_drafts(scheduler: Any, model_runner_output: Any) -> None:
    """Keeps what the step's output brought, for `post_step`."""
    setattr(scheduler, _BROUGHT, getattr(model_runner_output, _DRAFTS, None))


def post_step(original: Callable[..., None], self: Any, model_executed: bool) -> None:
    """Asks the workers for drafts like the engine core's, unless the output brought them."""
    scheduler = self.scheduler
    drafts: DraftTokenIds | None = getattr(scheduler, _BROUGHT, None)
    if drafts is None:
        original(self, model_executed)
        return
    setattr(scheduler, _BROUGHT, None)
    scheduler.update_draft_token_ids(drafts)
