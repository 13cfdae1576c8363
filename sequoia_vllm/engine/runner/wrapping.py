"""Timing the methods of one object, and what all recorders of steps ask about a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Mark = Any
"""A moment: seconds on the host, or an event on a device."""


def around(
    owner: Any,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[[float], None] | None = None,
) -> Callable[[], None]:
    """Calls ``before`` with the arguments, and ``after`` with the seconds, of each call.

    Returns:
        Ends it; of several on one method the last is ended first.
    """

    def with_seconds(start: float, end: float) -> None:
        if after is not None:
            after(end - start)

    return around_marks(owner, name, time.perf_counter, before, with_seconds)


def around_marks(
    owner: Any,
    name: str,
    mark: Callable[[], Mark],
    before: Callable[..., None] | None,
    after: Callable[[Mark, Mark], None],
) -> Callable[[], None]:
    """Wraps calls like `around`; ``after`` gets the marks made before and after each call."""
    method = getattr(owner, name)
    is_own = name in vars(owner)

    def timed(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        start = mark()
        try:
            return method(*args, **kwargs)
        finally:
            after(start, mark())

    def end() -> None:
        if is_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)

    setattr(owner, name, timed)
    return end


def runs_v2(runner: Any) -> bool:
    """Whether this is vLLM's Model Runner V2."""
    return hasattr(runner, "req_states")


def is_decoding(scheduler_output: Any) -> bool:
    """Whether no request of the step reads its prompt."""
    drafted = scheduler_output.scheduled_spec_decode_tokens
    return all(
        tokens == 1 + len(drafted.get(request, ()))
        for request, tokens in scheduler_output.num_scheduled_tokens.items()
    )
