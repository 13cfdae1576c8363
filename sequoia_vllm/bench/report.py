"""What a comparison found, as it is written to disk."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from pydantic import Field

from sequoia_vllm.bench.methods import Kind
from sequoia_vllm.json_file import FileModel

MOST_SPREAD = 1.15
"""Rounds disagree where the highest is more times the lowest: something disturbed the machine."""


class Spread(FileModel):
    """A value measured in several rounds."""

    median: float = Field(description="Over rounds.")
    low: float = Field(description="The lowest round's.")
    high: float = Field(description="The highest round's.")

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median and range of one value per round; at least one."""
        return cls(median=median(values), low=min(values), high=max(values))

    @property
    def disagrees(self) -> bool:
        """Whether rounds differ by more than `MOST_SPREAD`."""
        return self.high > MOST_SPREAD * self.low


class StepSplit(FileModel):
    """Where the mean step's time goes, seconds; steps in which the whole batch decodes."""

    target: float = Field(ge=0, description="The target's forward pass, LM head included.")
    draft: float = Field(
        ge=0,
        description="The draft's forward passes, LM head included; of a chain on V2 all drafting.",
    )
    drawing: float = Field(
        ge=0, description="The rest of drafting: choosing children, preparing the passes."
    )
    verify: float = Field(ge=0, description="Verification and commit; plain vLLM's: sampling.")
    other: float = Field(description="The rest: scheduling, preparing inputs, output, transport.")

    @property
    def outside(self) -> float:
        """Outside both models' forward passes, seconds."""
        return self.drawing + self.verify + self.other


class PredictedSpeed(FileModel):
    """What the cost model expected of a tree, from a profile and an acceptance vector."""

    speedup: float = Field(gt=0)
    tokens_per_step: float = Field(ge=1)
    step_seconds: float = Field(gt=0)
    extrapolated: bool = Field(description="Whether a time lies outside what was profiled.")
    profile: str = Field(description="Where the times come from.")
    acceptance: str = Field(description="Where the acceptance vector comes from.")


class Result(FileModel):
    """One method at one batch size and temperature."""

    method: str
    kind: Kind
    batch_size: int = Field(ge=1)
    temperature: float = Field(ge=0)
    drafts: int = Field(ge=0, description="Of a request and step; 0: no speculation.")
    depth: int = Field(ge=0, description="Of the drafts: a chain's length, a tree's depth.")
    tokens_per_second: Spread = Field(
        description="Of the whole batch while all of it decodes; prompts are not in it."
    )
    speedup: Spread = Field(description="Over plain vLLM in the same round.")
    tokens_per_step: float = Field(ge=0, description="Of a request; all rounds together.")
    step_seconds: float = Field(gt=0, description="Mean of all rounds.")
    split: StepSplit
    request_seconds: Spread = Field(
        description="Of a batch from sending it to the end of its last request, prompts included."
    )
    engine_parts: dict[str, float] | None = Field(
        default=None,
        description="Sequoia's own timers, seconds per step; prompts included.",
    )
    best_chain: bool = Field(default=False, description="The fastest of vLLM's chains here.")
    predicted: PredictedSpeed | None = None
    measured_over_predicted: float | None = Field(
        default=None, description="Speedups; none: not predicted."
    )
    note: str | None = Field(default=None, description="What must be said beside this number.")


class SearchedChain(FileModel):
    """One of vLLM's chains in the search for the best: a prediction, never a result."""

    method: str
    batch_size: int = Field(ge=1)
    temperature: float = Field(ge=0)
    drafts: int = Field(ge=1, description="Its length.")
    sampling: list[str] = Field(description="How it samples, where that is not vLLM's default.")
    tokens_per_step: float = Field(ge=1, description="Predicted; of a request.")
    tokens_per_second: float = Field(gt=0, description="Predicted; of the whole batch.")
    run: bool = Field(description="Whether it was chosen to be run: then it has a result.")


class Mismatch(FileModel):
    """A greedy output that differs from plain vLLM's."""

    method: str
    batch_size: int = Field(ge=1)
    prompt: int = Field(ge=0, description="Number of the prompt, from 0.")
    position: int = Field(ge=0, description="Output tokens that agree before it.")
    token: int | None = Field(default=None, description="The method's; none: it ended there.")
    plain_token: int | None = Field(default=None, description="Plain vLLM's; likewise.")
    gap: float | None = Field(
        default=None,
        description="From the difference on, the most that the target finds its best token "
        "likelier than the method's (log-probability, nats).",
    )
    near_tie: bool = Field(description="Whether rounding explains it: no error.")


class GreedyCheck(FileModel):
    """The comparison of all greedy outputs with plain vLLM's."""

    compared: int = Field(ge=0, description="Outputs compared.")
    identical: int = Field(ge=0)
    bound: float | None = Field(
        default=None, description="Largest gap of a near-tie, nats; none: every mismatch is wrong."
    )
    mismatches: list[Mismatch] = Field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether there is no mismatch, or rounding explains them all."""
        return all(mismatch.near_tie for mismatch in self.mismatches)


class BenchModel(FileModel):
    """A model of the pair."""

    name: str = Field(min_length=1)
    hashes: dict[str, str] = Field(description="SHA-256 of its files, where they are local.")
    grown_from: dict[str, Any] | None = Field(
        default=None, description="Origin of a synthetic target; none: an ordinary model."
    )


class BenchReport(FileModel):
    """A whole comparison."""

    schema_: Literal["sequoia-vllm/bench/v1"] = Field(
        default="sequoia-vllm/bench/v1", alias="schema"
    )
    date: datetime.date
    device: str = Field(min_length=1)
    target: BenchModel
    draft: BenchModel
    dtype: str
    settings: dict[str, Any] = Field(description="As given, with the prompts' name and hash.")
    results: list[Result] = Field(min_length=1)
    searched: list[SearchedChain] | None = Field(
        default=None,
        description="vLLM's chains as predicted from one of 8 drafts; none: they were given.",
    )
    greedy: GreedyCheck | None = Field(
        default=None, description="None: no greedy outputs were asked for."
    )
    notes: list[str] = Field(description="What must be said beside all numbers.")
    provenance: dict[str, Any] = Field(
        description="Arguments, time, versions, CPU, git revision, environment."
    )


def shown(results: Sequence[Result]) -> list[Result]:
    """Selects the results that pictures show: of vLLM's chains only the best one."""
    return [result for result in results if result.kind is not Kind.CHAIN or result.best_chain]
