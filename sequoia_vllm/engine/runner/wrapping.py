"""Timing the methods of one runner: what recordings of steps have in common."""

import time
from collections.abc import Callable
from typing import Any

Mark = Any
"""A moment: seconds on the host, or an event on a device."""


_PARTS = ("target", "sampling", "verify", "commit", "drafting", "drawing")  # of a step, in seconds


class Recording:
    """Wraps the methods of one runner, of a plain, a chain's or a Sequoia engine."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []
        self._ends: list[Callable[[], None]] = []

    def _mark(self) -> Mark:
        return time.perf_counter()

    def _around(
        self,
        owner: Any,
        name: str,
        after: Callable[[Mark, Mark], None] | None = None,
        before: Callable[..., None] | None = None,
    ) -> None:
        """Calls ``before`` with the arguments of each call, ``after`` with marks around it."""
        method, is_own = getattr(owner, name), name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            start = self._mark()
            try:
                return method(*args, **kwargs)
            finally:
                if after is not None:
                    after(start, self._mark())

        def end() -> None:
            if is_own:
                setattr(owner, name, method)
            else:
                delattr(owner, name)

        setattr(owner, name, timed)
        self._ends.append(end)

    def take(self, decoding: int | None = None) -> list[dict[str, Any]]:
        """The steps since the last call: fields of `StepRecord`.

        Args:
            decoding: Only steps in which so many requests decoded, and none read its prompt.
        """
        steps, self._steps = self._steps, []
        if decoding is None:
            return steps
        return [step for step in steps if step["decoding"] and step["requests"] == decoding]

    def end(self) -> None:
        """Ends the recording: the runner is as before."""
        while self._ends:
            self._ends.pop()()

    def _begin(self, scheduler_output: Any, *unused: Any, **unused_too: Any) -> None:
        scheduled = list(scheduler_output.num_scheduled_tokens.values())
        self._steps.append(
            {
                "start": time.perf_counter(),
                "requests": len(scheduled),
                "fewest": min(scheduled, default=0),
                "most": max(scheduled, default=0),
                "decoding": is_decoding(scheduler_output),
                **dict.fromkeys(_PARTS, 0.0),
                "passes": [],
            }
        )


def is_decoding(scheduler_output: Any) -> bool:
    """Whether no request of the step reads its prompt."""
    drafted = scheduler_output.scheduled_spec_decode_tokens
    return all(
        tokens == 1 + len(drafted.get(request, ()))
        for request, tokens in scheduler_output.num_scheduled_tokens.items()
    )
