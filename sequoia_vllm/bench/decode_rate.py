"""From the arrival times of tokens to the rate of steady decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sequoia_vllm.bench.methods import BenchError


@dataclass(frozen=True)
class Arrival:
    """What one step of the engine brought.

    Attributes:
        seconds: When, since the requests were sent.
        tokens: New tokens of each request of the batch; zeros are allowed.
        finished: Whether a request has all its tokens with it.
    """

    seconds: float
    tokens: tuple[int, ...]
    finished: bool


@dataclass(frozen=True)
class Steady:
    """Steps in which every request of the batch was decoding.

    Attributes:
        tokens: They brought, all requests together.
        steps: Their number.
        seconds: Their time.
        batch_size: Requests.
    """

    tokens: int
    steps: int
    seconds: float
    batch_size: int

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of one request."""
        return self.tokens / self.steps / self.batch_size

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return self.seconds / self.steps


def steady_part(arrivals: Sequence[Arrival]) -> Steady:
    """The steps after every request has its first token, up to the one that completes one.

    That one counts with all that it brought, also beyond the last token wanted. Long steps are
    the likeliest to end a request: without the last one, or with what is cut off of it left out,
    tokens per step would come out too low, by 7 % for 24 tokens of a tree that is 14 deep.

    Raises:
        BenchError: If there are none.
    """
    start, inside = _steady(arrivals)
    # A step that brought no tokens (its requests were preempted) still took its time.
    if start is None or not any(sum(arrival.tokens) for arrival in inside):
        raise BenchError(
            "no step had all requests decoding: completions are too short (--max-tokens), or the "
            "KV cache is too small for the batch (--kv-cache-gib)"
        )
    return Steady(
        tokens=sum(sum(arrival.tokens) for arrival in inside),
        steps=len(inside),
        seconds=inside[-1].seconds - start,
        batch_size=len(arrivals[0].tokens),
    )


def tokens_of_steps(arrivals: Sequence[Arrival]) -> list[int]:
    """What each request got in each steady step in which it got anything."""
    _, inside = _steady(arrivals)
    return [tokens for arrival in inside for tokens in arrival.tokens if tokens]


def _steady(arrivals: Sequence[Arrival]) -> tuple[float | None, list[Arrival]]:
    """When every request had its first token (None: never), and the steps of `steady_part`."""
    received = [0] * len(arrivals[0].tokens) if arrivals else []
    start = None
    inside: list[Arrival] = []
    for arrival in arrivals:
        if start is not None:
            inside.append(arrival)
        if arrival.finished:
            break
        received = [a + b for a, b in zip(received, arrival.tokens, strict=True)]
        if start is None and min(received) > 0:
            start = arrival.seconds
    return start, inside


def pooled(parts: Sequence[Steady]) -> Steady:
    """Several batches as one: a round's prompts."""
    return Steady(
        tokens=sum(part.tokens for part in parts),
        steps=sum(part.steps for part in parts),
        seconds=sum(part.seconds for part in parts),
        batch_size=parts[0].batch_size,
    )
