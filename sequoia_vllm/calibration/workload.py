"""Which completions a calibration runs next, and what another run needs to go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Completion:
    """One request to the engine.

    Attributes:
        prompt: Number of the prompt.
        tokens: What the engine is given: the prompt, and of a greedy completion
            what was generated before.
        generated: How many of these tokens were generated before.
    """

    prompt: int
    tokens: list[int]
    generated: int


@dataclass
class Workload:
    """Passes over the prompts with new samples each time, or each greedy completion once.

    A greedy completion repeated would be the same one, and counting it twice would make
    intervals look narrower than they are. One that an earlier run began is continued.

    Attributes:
        prompts: Token ids of each prompt.
        greedy: Whether completions are greedy.
        max_tokens: Tokens of a completion.
        started: Completions started so far, those of earlier runs included.
        completions: Greedy: tokens generated so far, by prompt.
        ended: Greedy: prompts whose completion came to its own end.
    """

    prompts: Sequence[list[int]]
    greedy: bool
    max_tokens: int
    started: int = 0
    completions: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._waiting = deque(filter(self._goes_on, range(len(self.prompts))))

    def next(self) -> Completion | None:
        """The next request; None: greedy completions are all done, or all running."""
        if not self.greedy:
            prompt = self.started % len(self.prompts)
        elif self._waiting:
            prompt = self._waiting.popleft()
        else:
            return None
        self.started += 1
        before = self.completions.get(prompt, [])
        return Completion(prompt, [*self.prompts[prompt], *before], len(before))

    def has_next(self) -> bool:
        """Whether `next` has a request to give."""
        return not self.greedy or bool(self._waiting)

    def update(self, completion: Completion, generated: Sequence[int]) -> None:
        """Notes what was generated so far by this request."""
        if self.greedy:
            before = self.completions.get(completion.prompt, [])[: completion.generated]
            self.completions[completion.prompt] = [*before, *generated]

    def finish(self, completion: Completion, ended: bool) -> None:
        """Notes that the request is done; ``ended``: by itself, not at its limit."""
        if self.greedy and ended:
            self.ended.add(completion.prompt)

    def tokens_left(self, completion: Completion) -> int:
        """Tokens that this request may generate."""
        return self.max_tokens - completion.generated

    def state(self) -> dict[str, Any]:
        """`CalibrationState`'s fields of the same names."""
        return {
            "started": self.started,
            "completions": {prompt: list(ids) for prompt, ids in self.completions.items()},
            "ended": sorted(self.ended),
        }

    def _goes_on(self, prompt: int) -> bool:
        return prompt not in self.ended and (
            len(self.completions.get(prompt, ())) < self.max_tokens
        )
