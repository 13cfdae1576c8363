"""Connects vLLM's scheduler and `DraftController`: outcomes of steps, and how much to draft next.

In the engine core, which learns of every step's trees and schedules the drafts of the next.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.adaptation.state import AdaptationState, StateError, Workload
from sequoia_vllm.adaptation.step import Step
from sequoia_vllm.adaptation.step_times import KNEE_CPU, assumed_seconds
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common.draft_schedule import fewer_drafts, reachable_drafts
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.common.step_messages import StepOutcome
from sequoia_vllm.engine.offload import is_offloaded
from sequoia_vllm.library.user_files import (
    USER_DIRECTORY_VARIABLE,
    adaptation_path,
    is_there,
    readable_directory,
)
from sequoia_vllm.verification.sampling import is_greedy

logger = logging.getLogger("vllm.sequoia")

# Seconds between writes, after decisions and otherwise. At worst a minute is lost.
_SAVE_DECISIONS, _SAVE_EVERY = 1.0, 60.0
# Rows whose arithmetic takes as long as reading the weights, on GPUs, and where weights come from a
# disk or the host; and the draft's share of a pass. Assumed until steps are measured.
_KNEE_GPU, _KNEE_OFFLOADED = 150.0, 1000.0
_DRAFT, _DRAFT_WITHOUT_WEIGHTS = 0.05, 0.003
_DOUBT_GPU = 0.6  # GPUs are more alike than CPUs, see `StepTimes`
_MOST_OPEN = 64  # steps whose drafting has not ended; two are usual


def new_adapter(vllm_config: Any, lookup: list[int] | None) -> "SchedulerAdapter | None":
    """What decides how much an engine drafts, by vLLM's ``lookup``; None: it does not adapt."""
    settings = SequoiaSettings.of(vllm_config)
    if lookup is None or settings.adapts_as is None:
        return None
    most = [0, *reachable_drafts(vllm_config)]
    on_gpu = vllm_config.use_v2_model_runner
    knee = _KNEE_GPU if on_gpu else KNEE_CPU
    assumed = partial(
        assumed_seconds, settings.tree, len(lookup) - 1,
        knee=_KNEE_OFFLOADED if is_offloaded(vllm_config) else knee,
        draft=_DRAFT if drafter(settings.drafter).has_weights else _DRAFT_WITHOUT_WEIGHTS,
    )  # fmt: skip
    doubt = _DOUBT_GPU if on_gpu else 1.0
    sizes = fewer_drafts(vllm_config)
    controller = DraftController(settings.tree, lookup, most, sizes, assumed, doubt, on_gpu)
    return SchedulerAdapter(controller, settings.adapts_as, keeps=settings.keeps)


class SchedulerAdapter:
    """One scheduler's controller, whose table is the scheduler's, told of its steps.

    What was learned is kept in a file of this name, in the user's directory. If it cannot be
    written, ``keeps`` is false, and the front end has logged it.
    """

    def __init__(self, controller: DraftController, name: str, keeps: bool = True) -> None:
        self.controller = controller
        directory = readable_directory()
        self._path = None if directory is None else adaptation_path(directory, name)
        self._keeps = keeps
        self._has_failed_to_keep = False
        self._sampled: set[str] = set()  # unfinished requests that are not greedy
        self._greedy: set[str] = set()
        self._drafts = 0  # of the step before
        self._before: float | None = None
        self._follows = False  # the next step begins where the drafting of the one before ends
        # Steps whose drafting has not ended.
        self._open: deque[Step] = deque(maxlen=_MOST_OPEN)
        self._drafting = 0.0  # seconds, of the step that was closed last
        self._paths = b""  # that arrived since
        self._reset: set[str] = set()  # requests that lost their cache because a user reset it
        self._saved, self._saved_decisions = time.perf_counter(), 0
        self._restore()

    def before_step(self, now: float, reset: set[str]) -> None:
        """Notes that a step is about to be scheduled, at ``now`` of ``time.perf_counter``. A user
        has reset the KV cache of the requests ``reset`` since the step before."""
        self._reset |= reset
        if self._before is None:
            self._before = now

    def follow(
        self, scheduled: Any, outcome: StepOutcome, gained: int, now: float, is_busy: bool
    ) -> None:
        """Takes one step, and sets drafts by batch size.

        Args:
            scheduled: vLLM's `SchedulerOutput` of the step.
            gained: See `Step`.
            now: When its outcome came, by ``time.perf_counter``.
            is_busy: Whether requests go on.
        """
        if outcome.times:
            self.controller.take_times(outcome.times)
        self._follow_requests(scheduled)
        requests = len(scheduled.num_scheduled_tokens)
        drafts = scheduled.num_spec_tokens_to_schedule
        if requests > 0:
            scored = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
            contexts = [new.num_computed_tokens for new in scheduled.scheduled_new_reqs]
            contexts += scheduled.scheduled_cached_reqs.num_computed_tokens
            preempted = scheduled.preempted_req_ids or set()
            step = Step(
                batch_size=requests,
                drafts=drafts,
                before=self._drafts,
                seconds=None if self._before is None else now - self._before,
                workload=self._workload(),
                gained=gained,
                prompts=max(scheduled.total_num_scheduled_tokens - requests - scored, 0),
                context=sum(contexts),
                preempted=len(preempted - self._reset),
                follows=self._follows,
                is_told=outcome.is_told,
            )
            self._open.append(step)
            self._drafts = drafts
            self._reset -= preempted
        self._close_steps(outcome)
        self._before, self._follows = now if is_busy else None, is_busy
        has_decided = self.controller.decisions != self._saved_decisions
        if self._keeps and now - self._saved > (_SAVE_DECISIONS if has_decided else _SAVE_EVERY):
            self._saved, self._saved_decisions = now, self.controller.decisions
            state = self.controller.state()
            threading.Thread(target=self._save, args=(state,), daemon=True).start()

    def _close_steps(self, outcome: StepOutcome) -> None:
        """Tells the controller of the steps whose drafting has ended, and of verified trees.

        A GPU drafts after the outcome: the time between two has the former step's drafting.
        """
        self._paths += outcome.paths
        for drafting in (0.0,) if outcome.drafting is None else outcome.drafting:
            if not self._open:
                return
            step = self._open.popleft()
            if (seconds := step.seconds) is not None:
                seconds = max(seconds + drafting - step.follows * self._drafting, 0.0)
            drafted = drafting + outcome.drafted
            self.controller.observe(
                replace(step, seconds=seconds, paths=self._paths, drafting=drafted)
            )
            self._drafting, self._paths = drafting, b""

    def _follow_requests(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            takes_best = params is None or is_greedy(params.temperature)
            (self._greedy if takes_best else self._sampled).add(new.req_id)
        for request_id in scheduled.finished_req_ids:
            self._greedy.discard(request_id)
            self._sampled.discard(request_id)

    def _workload(self) -> Workload:
        if self._greedy and self._sampled:
            return "mixed"
        return "sampled" if self._sampled else "greedy"

    def _restore(self) -> None:
        if self._path is None or not is_there(self._path):
            return
        try:
            if self.controller.restore(AdaptationState.load(self._path)):
                logger.info("Sequoia: going on with what was learned about drafts (%s)", self._path)
        except (StateError, ValueError, LookupError, OSError) as error:
            logger.warning("Sequoia: learning about drafts from the start: %s", error)

    def _save(self, state: AdaptationState) -> None:
        try:
            if self._path is None:
                raise OSError("this user has no home directory")
            state.save(self._path)
        except OSError as error:
            if not self._has_failed_to_keep:  # it will be tried again, again and again
                logger.warning(
                    "Sequoia: what was learned about drafts is not kept: %s (set %s to a directory "
                    "that can be written to)",
                    error, USER_DIRECTORY_VARIABLE,
                )  # fmt: skip
            self._has_failed_to_keep = True
