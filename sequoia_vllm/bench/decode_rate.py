"""Rates of steady decoding from the arrival times of tokens, and the time of a step's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sequoia_vllm.bench.methods import BenchError
from sequoia_vllm.hardware.step_curves import StepRecord

PARTS = ("target", "draft", "drawing", "verify")


@dataclass(frozen=True)
class Arrival:
    """New tokens of one engine step.

    Attributes:
        seconds: Time since the requests were sent.
        tokens: New tokens of each request of the batch, perhaps 0.
        finished: Whether some request now has all its tokens.
    """

    seconds: float
    tokens: tuple[int, ...]
    finished: bool


@dataclass(frozen=True)
class Steady:
    """Steps in which every request of the batch was decoding.

    Attributes:
        step_tokens: Tokens of each request in each step that gave it any.
    """

    step_tokens: list[int]
    steps: int
    seconds: float
    batch_size: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole batch per second."""
        return sum(self.step_tokens) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Tokens per request and step."""
        return sum(self.step_tokens) / self.steps / self.batch_size

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return self.seconds / self.steps


def steady_part(arrivals: Sequence[Arrival]) -> Steady:
    """Takes the steps after every request has its first token, up to the first completion.

    The completing step counts with all its tokens, also beyond the last one wanted: steps with
    many tokens are the likeliest to complete a request. Without them, tokens per step would be 7 %
    too low for 24 tokens of a tree of depth 14.

    Raises:
        BenchError: If there are no such steps.
    """
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
    step_tokens = [tokens for arrival in inside for tokens in arrival.tokens if tokens]
    # Steps without tokens (preempted requests) still count in time.
    if start is None or not step_tokens:
        raise BenchError(
            "no step had all requests decoding: completions are too short (--max-tokens), or the "
            "KV cache is too small for the batch (--kv-cache-gib)"
        )
    return Steady(step_tokens, len(inside), inside[-1].seconds - start, len(received))


def pooled(parts: Sequence[Steady]) -> Steady:
    """Joins the steady parts of several batches."""
    return Steady(
        step_tokens=[tokens for part in parts for tokens in part.step_tokens],
        steps=sum(part.steps for part in parts),
        seconds=sum(part.seconds for part in parts),
        batch_size=parts[0].batch_size,
    )


def part_seconds(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of each of `PARTS`, and the number of "steps"."""
    return {
        "target": sum(step.target for step in steps),
        "draft": sum(step.drafting - step.drawing for step in steps),
        "drawing": sum(step.drawing for step in steps),
        "verify": sum(step.sampling for step in steps),
        "steps": len(steps),
    }
