"""The schedule: one stored tree, and how much of it to draft at each batch size."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from sequoia_vllm.hardware.budget import Ranges
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.tree.token_tree import TokenTree


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
        ranges: vLLM's ``num_speculative_tokens_per_batch_size``: (first, last, drafts), from
            batch size 1, ascending, without gaps; the last one also stands for every larger
            batch. With 0 drafts it does not speculate.
        estimates: Expectations at the powers of two.
    """

    tree: TokenTree
    ranges: Ranges
    estimates: list[ScheduleEstimate]

    def num_speculative_tokens(self, batch_size: int) -> int:
        """Drafts per request at this batch size; 0: do not speculate."""
        for _, last, drafts in self.ranges:
            if batch_size <= last:
                return drafts
        return self.ranges[-1][2]

    def estimate(self, batch_size: int) -> ScheduleEstimate:
        """The estimate at the nearest batch size that has one, not above if possible."""
        below = [entry for entry in self.estimates if entry.batch_size <= batch_size]
        return below[-1] if below else self.estimates[0]
