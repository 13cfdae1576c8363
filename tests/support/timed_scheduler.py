"""A scheduler for ``--scheduler-cls``: steps take what a simulated machine takes for them."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from sequoia_vllm.engine.common.step_messages import outcome_of
from sequoia_vllm.engine.core import scheduling
from tests.support.step_clock import MACHINE, VARIABLE, StepClock


class TimedScheduler(Scheduler):
    """vLLM's scheduler. Ours, if it is there, comes before it and reads the same clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drafted = 0.0
        self._clock = StepClock(Path(os.environ[VARIABLE]))
        scheduling.time = SimpleNamespace(perf_counter=lambda: self._clock.now)
        scheduling.outcome_of = lambda output: replace(outcome_of(output), drafted=self._drafted)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = super().schedule(*args, **kwargs)
        rows, requests = scheduled.total_num_scheduled_tokens, len(scheduled.num_scheduled_tokens)
        if rows > 0:
            drafts = scheduled.num_spec_tokens_to_schedule or 0
            depth = self.tree.trim(drafts + 1).depth if drafts else 0
            scored = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
            contexts = [new.num_computed_tokens for new in scheduled.scheduled_new_reqs]
            contexts += scheduled.scheduled_cached_reqs.num_computed_tokens
            prompts, context = rows - requests - scored, sum(contexts)
            self._clock.move(MACHINE.seconds(depth, drafts, requests, rows, prompts, context))
            self._drafted = MACHINE.drafting(depth, drafts, requests, prompts)
        return scheduled
