"""Requests whose prompts come in pieces: what a turn leaves when it ends amid an accepted path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sequoia_vllm.engine.common.settings import SequoiaSettings


def handle_stopped_request(original: Callable[..., bool], self: Any, request: Any) -> bool:
    """Stops a request like the scheduler, whose requests go on where the target has computed.

    That is past a turn's end where its last step accepted tokens behind it, and the next
    piece would begin in the slots of these. Without speculation the last token that is
    emitted is never computed, and is left out of the next turn; so it is here.

    Args:
        original: vLLM's.
        self: Its scheduler.
        request: One that has stopped; a resumable one may go on.
    """
    if request.resumable and SequoiaSettings.enabled(self.vllm_config):
        known = request.num_tokens - 1 + request.num_output_placeholders
        request.num_computed_tokens = min(request.num_computed_tokens, known)
    return original(self, request)
