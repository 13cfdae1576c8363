"""vLLM's scheduler with trees: how much is drafted, in which slots, for whom, and with what gain.

It runs in the engine core, told to by ``scheduler_cls``. A step's allocation covers the tree that
it scores, which counts among the step's tokens, and the next one, in look-ahead slots behind. vLLM
looks up the drafts of the next tree after the allocation, when it knows how many requests it could
schedule. So we bound the number before, by the requests that run.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from sequoia_vllm.adaptation.told_branches import MOST_TOLD
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.common.step_messages import (
    REPORT,
    Predicted,
    StepReport,
    attach_predicted,
    mark_loaded,
    outcome_of,
)
from sequoia_vllm.engine.core.adapting import new_adapter
from sequoia_vllm.engine.core.eligibility import (
    has_branches_on_v2,
    is_longer_than_draft,
    processors_without_trees,
    reason_without_drafts,
)
from sequoia_vllm.engine.core.followed_predictions import FollowedPredictions
from sequoia_vllm.engine.core.grammar import TreeGrammars
from sequoia_vllm.engine.core.history import History, key_of
from sequoia_vllm.engine.core.prediction_option import foretold, with_history
from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.metrics.prometheus import Reason

logger = logging.getLogger("vllm.sequoia")

_SECONDS_OF_REPORT = 1.0  # then the front end is told again: it takes a silent engine for idle
_ANSWERED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


class TreeScheduling(Scheduler):
    """vLLM's scheduler with trees, where it waits for a step's outcome; or before another one."""

    dynamic_sd_lookup: Any
    num_lookahead_tokens: int
    structured_output_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = SequoiaSettings.of(self.vllm_config)
        self.tree = settings.tree  # requests draft its first nodes
        kind = drafter(settings.drafter)
        if kind.has_weights and not kind.is_head:
            # Newer versions ask for no drafts where steps only read prompts. A draft model reads
            # them in these steps, too: else the first step that drafts would read a whole prompt.
            self.can_skip_drafts = False
        # Drops drafts after the first that a grammar forbids, and fills the masks of a chain; a
        # node's is by its own path. Until: vLLM's manager is told the topology of drafts.
        self.structured_output_manager = TreeGrammars(self.structured_output_manager)
        others = processors_without_trees(self.vllm_config)
        self.nobody_drafts = bool(others)  # no request ever does
        if others:
            logger.warning(
                "Sequoia: nothing is drafted, as these logits processors may not run on trees: %s. "
                "If they may, say so: docs/requests.md#your-logits-processors",
                ", ".join(others),
            )
        # Drafts of a request that vLLM has counts for: those of a branch where there are any (V1).
        on_v2 = self.vllm_config.use_v2_model_runner
        drafts = self.tree.num_speculative_tokens
        self.most_counted = drafts if on_v2 else max(drafts, MOST_TOLD)
        # Followed here where the device follows them, too; None: workers tell what becomes of them.
        self.predictions = None
        if on_v2:
            self.predictions = FollowedPredictions(self.tree, has_branches_on_v2(self.vllm_config))
        # What earlier answers said; None: nobody asked for it.
        self.history = History() if settings.history and not self.nobody_drafts else None
        self.brought: Any = None  # drafts from the last step's output, until `take_drafts`
        # Most drafts while a measuring tool, or a draft that failed, limits them; without it those
        # that are configured by batch size, from the first limit on.
        self.draft_limit: int | None = None
        self.configured: list[int] | None = None
        self.loaded: set[str] = set()  # requests whose keys a connector loaded, until they run
        self._has_said_too_long = False
        self._reported: StepReport | None = None
        self._report_again = 0.0
        # Decides how much to draft, by what steps take; None: it is as configured.
        self.adapter = new_adapter(self.vllm_config, self.dynamic_sd_lookup)
        if self.adapter is not None:
            self.dynamic_sd_lookup = self.adapter.controller.lookup  # changed in place

    # -- what is drafted, and where ----------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedules like vLLM, with slots for the drafts of this batch and no more drafts than so.

        A batch may be smaller than expected. A step none of whose requests ever drafts is
        scheduled, and measured, as one without drafts.
        """
        if self.dynamic_sd_lookup is None:
            return super().schedule(*args, **kwargs)
        if self.adapter is not None:
            self.adapter.before_step(time.perf_counter(), self.reset_preempted_req_ids)
        running, waiting = self.get_request_counts()
        largest = min(running + waiting, self.max_num_running_reqs)
        # Of any batch: of all running requests, with none to all waiting ones.
        most = max(self.dynamic_sd_lookup[max(running, 1) : largest + 1], default=0)
        cut, slots = [min(each, most) for each in self.dynamic_sd_lookup], self._slots_for(most)
        # Cut to the drafts that there are slots for, and these slots, while a step is scheduled.
        with (
            patched(self, "dynamic_sd_lookup", cut),
            patched(self, "num_lookahead_tokens", slots),
        ):
            scheduled = super().schedule(*args, **kwargs)
        if self.nobody_drafts or all(
            reason_without_drafts(self.requests[request].sampling_params)
            for request in scheduled.num_scheduled_tokens
        ):
            scheduled.num_spec_tokens_to_schedule = 0
        return scheduled

    # Until: vLLM tells workers what a connector has loaded.
    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Calls vLLM's, then tells workers which requests begin on keys of a connector."""
        super()._update_after_schedule(scheduler_output)
        begun = scheduler_output.num_scheduled_tokens.keys()
        if scheduler_output.has_sync_kv_loads:  # of some request that begins with this step
            self.loaded |= begun
        if self.loaded:
            mark_loaded(scheduler_output, self.loaded)
            self.loaded = self.loaded & self.requests.keys() - begun

    # Until: vLLM tells workers what a connector has loaded.
    def _update_waiting_for_remote_kv(self, request: Any) -> None:
        """Calls vLLM's, and notes the request."""
        super()._update_waiting_for_remote_kv(request)
        self.loaded.add(request.request_id)

    def _slots_for(self, drafts: int) -> int:
        """Look-ahead slots of a step that grows trees of so many drafts."""
        beyond: int = self.num_lookahead_tokens - self.num_spec_tokens
        if beyond and drafts > 0:
            # A head that drafts blocks reads a root and masks. Some heads read masks for all levels
            # of the engine's tree, however little of it is drafted.
            drafts = max(drafts, self.tree.depth)
        return drafts + beyond

    def end_adaptation(self) -> None:
        """From now on drafts are as configured, and measuring tools limit them."""
        if self.adapter is not None:
            self.dynamic_sd_lookup = self.adapter.controller.schedule
        self.adapter = None

    def _limit_drafts(self, limit: int) -> None:
        """Ends adaptation and schedules at most ``limit`` drafts from now on."""
        if limit == self.draft_limit:
            return
        self.end_adaptation()
        if self.configured is None:
            self.configured = self.dynamic_sd_lookup
        self.dynamic_sd_lookup = [min(drafts, limit) for drafts in self.configured]
        self.draft_limit = limit

    # -- what became of it -------------------------------------------------------------------

    # Until: vLLM carries a speculative method's own statistics from the worker to its loggers.
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Updates like vLLM, and adds the step's report to its statistics if it makes any."""
        started = time.perf_counter()
        outcome = outcome_of(model_runner_output)
        served = self._without_ended(scheduler_output, model_runner_output, outcome.paths)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.brought = outcome.drafts
        known = self.structured_output_manager.branches
        if outcome.drafts is not None and (outcome.branches or known):
            self._note_branches(outcome.drafts.req_ids, outcome.branches)
        if outcome.limit is not None:
            self._limit_drafts(outcome.limit)
        if self.adapter is not None:
            gained, is_busy = _gained(outputs), bool(self.running)
            self.adapter.follow(scheduler_output, outcome, gained, started, is_busy)
        if getattr(self, "spec_decode_metrics_level", "none") != "none":
            # At the tree's depth, or at the longest branch that was accepted.
            for one in (one for output in outputs.values() for one in output.outputs):
                if (metrics := one.spec_decode_metrics) is not None:
                    used = np.flatnonzero(metrics.histogram).max(initial=self.tree.depth)
                    del metrics.histogram[int(used) + 1 :]
        if outcome.predicted or (self.predictions is not None and self.predictions.requests):
            self._attach_predicted(scheduler_output, outcome.predicted, outputs)
        undrafted = self._reasons_of_new(scheduler_output)
        if self.log_stats:
            requests = len(scheduler_output.num_scheduled_tokens)
            drafts = scheduler_output.num_spec_tokens_to_schedule
            if self.adapter is not None and requests:
                drafts = self.adapter.controller.decided(requests)
            report = StepReport(
                drafts=drafts if requests else None,
                paths=served,
                undrafted=undrafted,
                speedup=None if self.adapter is None else self.adapter.controller.speedup,
                tree=self.tree.checksum if served else 0,
                has_failed=outcome.has_failed,
                requests=requests,
            )
            stats = [one.scheduler_stats for one in outputs.values() if one.scheduler_stats]
            if stats and self._is_news(report, started):  # vLLM gives them to one front end
                setattr(stats[0], REPORT, report)
        return outputs

    # Until: vLLM counts more drafts of a request than are configured.
    def add_request(self, request: Any) -> None:
        """Calls vLLM's, with room in its counts for a branch. A new request is told the history."""
        super().add_request(request)
        if self.requests.get(request.request_id) is request:
            self._tell_history(request)
            if self.predictions is not None:
                self.predictions.start(request.request_id, request.sampling_params)
        if (metrics := request.spec_decode_metrics) is not None:
            metrics.histogram += [0] * (self.most_counted - self.num_spec_tokens)

    def _tell_history(self, request: Any) -> None:
        """Gives a request what earlier answers said, if it drafts and brings no prediction."""
        params = request.sampling_params
        if self.history is None or request.resumable or reason_without_drafts(params) is not None:
            return
        if foretold(params) is None and (tokens := self.history.tokens(_history_key(request))):
            request.sampling_params = with_history(params, tokens)

    # Until: vLLM counts more drafts of a request than are configured.
    def make_spec_decoding_stats(self, counted: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls vLLM's, with room in its counts for a branch."""
        if counted is None:
            counted = SpecDecodingStats.new(self.most_counted)
        return super().make_spec_decoding_stats(counted, *args, **kwargs)

    def _is_news(self, report: StepReport, now: float) -> bool:
        """Whether the front end needs a report: it knows what is as in the last one."""
        counts = report.paths or report.undrafted or not self.running
        if counts or report != self._reported or now > self._report_again:
            self._reported, self._report_again = report, now + _SECONDS_OF_REPORT
            return True
        return False

    def _attach_predicted(
        self, scheduled: Any, predicted: Mapping[str, Predicted], outputs: dict[int, Any]
    ) -> None:
        """Puts what became of predictions on the outputs of requests that ask for it."""
        every = [one for output in outputs.values() for one in output.outputs]
        if self.predictions is not None:
            self.predictions.forget(scheduled.finished_req_ids - self.requests.keys())
            predicted = self.predictions.count(scheduled.scheduled_spec_decode_tokens, every)
        for one in every if predicted else ():
            if (counts := predicted.get(one.request_id)) is not None:
                attach_predicted(one, counts)

    def _note_branches(self, drafted: Sequence[str], branches: frozenset[str]) -> None:
        """Tells the grammars whose drafts are branches; of requests that wait they stay so."""
        grammars = self.structured_output_manager
        grammars.branches = grammars.branches.difference(drafted) & self.requests.keys() | branches

    def take_drafts(self) -> Any:
        """vLLM's `DraftTokenIds` that the last step's output brought, once; None: it had none."""
        drafts, self.brought = self.brought, None
        return drafts

    def _without_ended(self, scheduled: Any, output: Any, paths: bytes) -> bytes:
        """Leaves out trees of requests that were aborted while the step ran.

        Where the paths are of another step than ``output``, all are kept.
        """
        if not paths:
            return paths
        drafts = scheduled.scheduled_spec_decode_tokens
        requests = [self.requests.get(i) for i in output.req_ids if drafts.get(i)]
        kept = [request is not None and not request.is_finished() for request in requests]
        size = TreeCounts.path_bytes(self.tree)
        if all(kept) or len(paths) != size * len(kept):
            return paths
        return b"".join(paths[i * size : (i + 1) * size] for i, keeps in enumerate(kept) if keeps)

    # Until: vLLM carries a speculative method's own statistics from the worker to its loggers.
    def make_stats(self, spec_decoding_stats: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Makes vLLM's statistics; accepted positions end where the tree does."""
        if spec_decoding_stats is not None:
            del spec_decoding_stats.num_accepted_tokens_per_pos[self.tree.depth :]
            del spec_decoding_stats.num_draft_tokens_per_pos[self.num_spec_tokens :]
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def _reasons_of_new(self, scheduled: Any) -> list[Reason]:
        """Reasons of the requests that begin in this step and get no drafts."""
        new = scheduled.scheduled_new_reqs
        if self.nobody_drafts:
            return ["custom_logits_processors"] * len(new)
        reasons: list[Reason] = []
        for request in new:
            reason = reason_without_drafts(request.sampling_params)
            prompt = request.prompt_token_ids
            if reason is None and is_longer_than_draft(self.vllm_config, prompt):
                reason = "longer_than_draft"
                if not self._has_said_too_long:
                    self._has_said_too_long = True
                    draft = self.vllm_config.speculative_config.draft_model_config
                    logger.warning(
                        "Sequoia: a prompt of %d tokens has no drafts, nor will others as long: %s "
                        "reads requests of up to %d tokens",
                        len(prompt), draft.model, draft.max_model_len,
                    )  # fmt: skip
            if reason is not None:
                reasons.append(reason)
        return reasons

    # Until: vLLM goes back to the turn's end.
    def _handle_stopped_request(self, request: Any) -> bool:
        """Stops a request like vLLM; a session's next turn begins where plain vLLM's does.

        The last step may have accepted tokens behind the turn's end; vLLM would go on behind them.
        Plain vLLM never computes the last token that it emits: the next turn begins in its slot.
        The history gets the answers of requests that are no sessions.
        """
        if request.resumable:
            known = request.num_tokens - 1 + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, known)
        elif self.history is not None and request.status in _ANSWERED:
            self.history.add(_history_key(request), request.output_token_ids)
        return super()._handle_stopped_request(request)

    # Until: vLLM has a history of its own, and resets it.
    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Calls vLLM's, and forgets the history: other weights may follow."""
        if self.history is not None:
            self.history = History()
        return super().reset_prefix_cache(*args, **kwargs)


def _history_key(request: Any) -> bytes:
    adapter = request.lora_request
    return key_of(request.cache_salt, None if adapter is None else adapter.lora_name)


def _gained(outputs: dict[int, Any]) -> int:
    """Tokens that the front ends receive of a step, beyond one for each request."""
    new = [len(one.new_token_ids) for output in outputs.values() for one in output.outputs]
    return sum(new) - sum(map(bool, new))


def post_step(original: Callable[..., None], self: Any, model_executed: bool) -> None:
    """Asks the workers for drafts like the engine core's, unless the step's output brought them."""
    scheduler = self.scheduler
    drafts = scheduler.take_drafts() if isinstance(scheduler, TreeScheduling) else None
    if drafts is None:
        original(self, model_executed)
    else:
        scheduler.update_draft_token_ids(drafts)


def before_users(ours: type[TreeScheduling], users: type[Scheduler], **arguments: Any) -> Any:
    """Makes a scheduler that has what ours does before what the user's own class does."""
    return type(f"{ours.__name__}Before{users.__name__}", (ours, users), {})(**arguments)
