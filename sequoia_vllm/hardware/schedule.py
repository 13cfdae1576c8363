"""The schedule: one stored tree, and how much of it to draft at each batch size."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from sequoia_vllm.json_file import FileModel
from sequoia_vllm.tree.token_tree import TokenTree


class ScheduleRange(FileModel):
    """Batch sizes that use the same prefix of the tree."""

    first: int = Field(ge=1, description="Smallest batch size of the range.")
    last: int = Field(ge=1, description="Largest batch size of the range.")
    num_speculative_tokens: int = Field(
        ge=0, description="Drafts per request: nodes 1..n of the tree; 0: no speculation."
    )


class ScheduleEstimate(FileModel):
    """What the schedule is expected to do at one batch size."""

    batch_size: int = Field(ge=1)
    num_speculative_tokens: int = Field(ge=0)
    expected_tokens: float = Field(ge=1, description="Per request and step.")
    speedup: float = Field(gt=0, description="Against plain decoding at this batch size.")
    optimum: float = Field(
        gt=0, description="Speedup of the best tree found for this batch size alone."
    )
    extrapolated: bool = Field(
        default=False, description="Whether it rests on times outside what was measured."
    )


@dataclass(frozen=True)
class Schedule:
    """What an engine needs: the tree, and its prefix by batch size.

    Attributes:
        tree: In value order; its largest prefix that any range uses.
        ranges: From batch size 1, ascending, without gaps; the last one also
            stands for every larger batch.
        estimates: Expectations at the powers of two.
    """

    tree: TokenTree
    ranges: list[ScheduleRange]
    estimates: list[ScheduleEstimate]

    def num_speculative_tokens(self, batch_size: int) -> int:
        """Drafts per request at this batch size; 0: do not speculate."""
        for entry in self.ranges:
            if batch_size <= entry.last:
                return entry.num_speculative_tokens
        return self.ranges[-1].num_speculative_tokens

    def per_batch_size(self) -> list[tuple[int, int, int]]:
        """vLLM's ``num_speculative_tokens_per_batch_size``: (first, last, drafts)."""
        return [(entry.first, entry.last, entry.num_speculative_tokens) for entry in self.ranges]

    def estimate(self, batch_size: int) -> ScheduleEstimate:
        """The estimate at the nearest batch size that has one, not above if possible."""
        below = [entry for entry in self.estimates if entry.batch_size <= batch_size]
        return below[-1] if below else self.estimates[0]
