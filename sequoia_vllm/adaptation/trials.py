"""What a controller keeps of each octave of batch sizes: its trials, and what they found."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from sequoia_vllm.adaptation.state import Workload
from sequoia_vllm.adaptation.step_times import FEWEST

# After steps without drafts a trial has so many trees, to count what is accepted. One whose speed
# is near has so many steps. Any is given up after so many steps of other kinds.
_TREES, _STEPS, _GIVE_UP = 24, 24, 96
_MORE = 0.2  # share of the requests
# A trial of no drafts goes on for so many where its speed is near.
_NEAR_STEPS = 88


@dataclass(frozen=True)
class Step:
    """One step of an engine.

    Attributes:
        batch_size: Requests in it.
        drafts: Per request, as scheduled for this step and for the one before it; None: the
            number has just changed.
        seconds: Since the step before it; None: the engine was idle, or it is not known.
        workload: Whether its requests are greedy.
        paths: Its verified trees, as bytes (`TreeCounts.from_bytes`).
        prompts: Tokens of prompts that it read.
        context: Tokens of context of all its requests.
        preempted: Requests that lost their cache before it.
    """

    batch_size: int
    drafts: int | None
    seconds: float | None
    workload: Workload
    paths: bytes = b""
    prompts: int = 0
    context: int = 0
    preempted: int = 0


@dataclass
class Trial:
    """A few steps with another number of drafts; ``before``: those of the octave.

    Where nothing was drafted before, the draft first reads the requests' tokens, perhaps for
    some steps. ``all_steps`` and ``seconds`` count these, too.
    """

    drafts: int
    before: list[int]
    steps: int = 0
    seen: int = 0
    trees: int = 0
    share: float = 0.0  # of the requests that have trees
    all_steps: int = 0
    seconds: float = 0.0

    def has_more_trees(self, share: float) -> bool:
        """Whether many more requests draft than in any step before: some had still to be read."""
        more = share > self.share + _MORE
        self.share = max(share, self.share)
        return more

    def is_over(self, is_near: bool) -> bool:
        """Whether enough was seen; ``is_near``: it is about as fast as what it is compared with."""
        enough = self.before[0] > 0 or self.trees >= _TREES or self.seen >= _STEPS
        enough = enough and self.seen >= FEWEST
        longest = _NEAR_STEPS if self.drafts == 0 else _STEPS
        return (enough and not is_near) or self.seen >= longest or self.steps >= _GIVE_UP


@dataclass
class Octave:
    """Batch sizes from a power of two up to the next: they are decided on together.

    Attributes:
        due: By number of drafts, the step in which it is tried.
        wait: By number of drafts, steps from a lost trial to the next.
        decided_for, decide_at: The workload of the last decision, and the step of the next.
        has_news: Whether its drafts were changed, and nothing was logged about it.
        said, said_at: Drafts that were logged, and when.
    """

    due: dict[int, int]
    steps: int = 0
    wait: dict[int, int] = field(default_factory=dict)
    trial: Trial | None = None
    decided_for: Workload | None = None
    decide_at: int = 1
    has_news: bool = False
    said: int = -1
    said_at: float = -inf
