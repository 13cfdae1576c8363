"""Requests that begin on keys which a KV connector loaded, from the engine core to its workers.

A connector may have stored a block before the draft read its tokens. So a draft model takes what
was loaded as not read, and reads it again.
"""

from collections.abc import Collection
from typing import Any

_FIELD = "sequoia_loaded"  # set on a step's SchedulerOutput, which executors pickle as a whole


def mark_loaded(scheduler_output: Any, requests: Collection[str]) -> None:
    """Tells workers which requests have loaded keys, for the step in which they begin."""
    setattr(scheduler_output, _FIELD, frozenset(requests))


def is_loaded(scheduler_output: Any, request_id: str) -> bool:
    """Whether the request begins on loaded keys."""
    return request_id in getattr(scheduler_output, _FIELD, ())
