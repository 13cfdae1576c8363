"""One step of an engine, in the words of a controller."""

from dataclasses import dataclass

from sequoia_vllm.adaptation.state import Workload


@dataclass(frozen=True)
class Step:
    """What an engine's step did, and how long it took."""

    batch_size: int  # requests
    drafts: int  # per request, grown for the next step
    seconds: float | None  # since the step before, or its scheduling after idling; None: not known
    workload: Workload
    paths: bytes = b""  # its verified trees, as bytes (`TreeCounts.from_bytes`)
    before: int | None = None  # drafts of the step before, whose trees it scores; None: `drafts`
    prompts: int = 0  # prompt tokens that it read
    context: int = 0  # tokens that its requests had before
    preempted: int = 0  # requests that lost their KV cache before it, for want of memory
    gained: int = 0  # tokens beyond one each: accepted, less those cut off at a request's end
    drafting: float = 0.0  # seconds of it in which drafts were grown; 0: none, or not timed
    follows: bool = True  # another one at once; false: the engine was idle before it
    is_told: bool = False  # branches were scored or made: no number of drafts takes so long

    @property
    def scored(self) -> int:
        """Drafts per request of the trees that it scored."""
        return self.drafts if self.before is None else self.before
