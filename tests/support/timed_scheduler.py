"""A scheduler for ``--scheduler-cls``: steps take what a simulated machine takes for them."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from sequoia_vllm.engine.common.step_messages import outcome_of
from sequoia_vllm.engine.core import scheduling
from tests.support.step_clock import MACHINES, VARIABLE, WHICH, StepClock


class TimedScheduler(Scheduler):
    """vLLM's scheduler. Ours, if it is there, comes before it and reads the same clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drafted, self._arrived = 0.0, 0
        self._clock = StepClock(Path(os.environ[VARIABLE]))
        self._machine = MACHINES[os.environ[WHICH]]
        scheduling.time = SimpleNamespace(perf_counter=lambda: self._clock.now)
        # Without the passes that were timed at start, which took real time.
        scheduling.outcome_of = lambda output: replace(
            outcome_of(output), drafted=self._drafted, times=()
        )

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self._arrived += 1

    def has_requests(self) -> bool:
        """Not until all that were sent together have arrived: a busy machine takes a while."""
        return self._arrived >= self._clock.sent and super().has_requests()

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
            took = self._machine.seconds(depth, drafts, requests, rows, prompts, context)
            self._clock.move(took)
            self._drafted = self._machine.drafting(depth, drafts, requests, prompts)
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if running := len(scheduler_output.num_scheduled_tokens):
            each = (one for output in outputs.values() for one in output.outputs)
            received = sum(len(one.new_token_ids) for one in each)
            self._clock.move(0.0, tokens=received / running)
        return outputs
