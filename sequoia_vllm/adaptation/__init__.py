"""How much of the tree to draft, by what a serving engine measures; imports no vLLM.

`DraftController` follows an engine's steps: what became of the trees (`FadingAcceptance`), and
how long steps take (`StepTimes`). Now and then it tries other numbers of drafts for a few steps,
none among them, and goes over to what is clearly faster. `AdaptationState` keeps what it learned
for the engine's next start.
"""

from sequoia_vllm.adaptation.acceptance import FadingAcceptance
from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.adaptation.state import AdaptationState, StateError, Workload
from sequoia_vllm.adaptation.step_times import StepTimes
from sequoia_vllm.adaptation.trials import Step

__all__ = [
    "AdaptationState", "DraftController", "FadingAcceptance", "StateError", "Step", "StepTimes",
    "Workload",
]  # fmt: skip
