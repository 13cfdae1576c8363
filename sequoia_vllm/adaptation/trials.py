"""What a controller keeps for each octave of batch sizes: its trials, and what they found."""

from dataclasses import dataclass, field
from math import inf

from sequoia_vllm.adaptation.state import Workload
from sequoia_vllm.adaptation.step_times import FEWEST

# Trees of a trial while speculation is off, to count acceptance; steps of a trial whose speed is
# near; and steps of any kind after which a trial is given up.
_TREES, _STEPS, _GIVE_UP = 24, 24, 96
# Steps of a trial of no drafts whose speed is near.
_NEAR_STEPS = 88


@dataclass(frozen=True)
class Step:
    """One step of an engine."""

    batch_size: int
    drafts: int | None
    """Drafts per request, in this step and the one before; None: the number has just changed."""
    seconds: float | None  # since the step before, or its scheduling after idling; None: not known
    workload: Workload
    paths: bytes = b""  # its verified trees, as bytes (`TreeCounts.from_bytes`)
    prompts: int = 0  # prompt tokens that it read
    context: int = 0
    preempted: int = 0  # requests that lost their KV cache before it, for want of memory
    gained: int = 0  # tokens beyond one each: accepted, less those cut off at a request's end
    grown: int | None = None  # drafts per request for the next step; None: `drafts`
    drafting: float = 0.0  # seconds of it that the next step's drafts took


@dataclass
class Trial:
    """A few steps with another number of drafts; ``before`` are the octave's own. ``all_steps`` and
    ``seconds`` include those in which the draft first reads what it missed."""

    drafts: int
    before: list[int]
    steps: int = 0
    seen: int = 0
    trees: int = 0
    share: float = 0.0  # of the requests that have trees
    all_steps: int = 0
    seconds: float = 0.0

    def is_over(self, is_near: bool) -> bool:
        """Whether enough was seen; ``is_near``: it is about as fast as the drafts before it."""
        enough = self.before[0] > 0 or self.trees >= _TREES or self.seen >= _STEPS
        enough = enough and self.seen >= FEWEST
        longest = _NEAR_STEPS if self.drafts == 0 else _STEPS
        return (enough and not is_near) or self.seen >= longest or self.steps >= _GIVE_UP


@dataclass
class Octave:
    """Batch sizes from a power of two up to the next, which share one decision."""

    due: dict[int, int]  # by number of drafts, the step of the next trial
    steps: int = 0
    wait: dict[int, int] = field(default_factory=dict)
    """By number of drafts, steps from a lost trial to the next."""
    plain_trials: int = 0  # trials of no drafts that ended
    trial: Trial | None = None
    decided_for: Workload | None = None
    decide_at: int = 1
    """The step of the next decision; the last one was for the workload `decided_for`."""
    has_news: bool = False  # whether its drafts changed since the last log line
    said: int = -1
    said_at: float = -inf  # when `said`, the drafts, were logged
