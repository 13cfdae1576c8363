"""Base of Sequoia's workers, on every device and runner."""

import platform
from copy import copy
from functools import cached_property
from typing import Any

from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds
from vllm.v1.worker.gpu_worker import Worker

from sequoia_vllm.engine.common.cluster import (
    check_group,
    check_ranks,
    check_versions,
    current_device_name,
    current_versions,
    in_lock_step,
)
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.common.step_messages import Predicted, StepOutcome, attach_outcome


class AgreeingWorker(Worker):
    """A worker that starts only if all ranks that run with it have the same decisions."""

    # Until: vLLM compares versions of plugins between nodes, and one node configures all.
    def init_device(self) -> None:
        """Calls vLLM's, then refuses ranks that decided differently (`check_ranks`)."""
        super().init_device()
        group = get_world_group() if in_lock_step(self.vllm_config) else get_tp_group()
        check_ranks(self.vllm_config, group.cpu_group)


class SequoiaWorker(AgreeingWorker):
    """Steps that are timed and report what became of their trees."""

    _draft_limit: int | None = None

    # Until: vLLM compares versions of plugins between nodes, and one node configures all.
    def init_device(self) -> None:
        """Calls vLLM's; refuses versions, decisions and devices that do not fit the engine's."""
        versions = SequoiaSettings.of(self.vllm_config).versions
        check_versions(versions, current_versions(), platform.node())
        super().init_device()
        check_group(
            self.vllm_config, current_device_name(self.device.index or 0), get_tp_group().cpu_group
        )

    # Until: vLLM has a place for tensors of speculators that are not weights.
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Calls vLLM's, then makes all that trees need on the device besides weights.

        Memory taken while loading counts as weights, and is lost in the second level of sleep. Ours
        is of the kind that vLLM keeps, and there before memory is profiled.
        """
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self.use_v2_model_runner:
            with self._maybe_get_memory_pool_context(tag="runtime"):
                self.model_runner.set_up_trees()

    # Until: its warm-up has a sampled request without penalties; for statistics: never.
    def compile_or_warm_up_model(self) -> Any:
        """Warms up like vLLM's worker, then forgets the steps of its dummy requests.

        The V1 runner then times passes. V2's timed its graphs when it captured them.
        """
        warmed_up = super().compile_or_warm_up_model()
        if not self.use_v2_model_runner:
            self.model_runner.time_steps()
        self.model_runner.forget_steps()
        return warmed_up

    @cached_property
    def _takes_single_steps(self) -> bool:
        """Whether the engine core waits for a step's outcome: pipelines are refused at start-up."""
        return not self.vllm_config.scheduler_config.async_scheduling

    # Until: vLLM tells plugins how long the parts of a step take; vLLM's engine core sends workers
    # one message per step.
    def execute_model(self, scheduler_output: Any) -> Any:
        """Calls vLLM's, and samples at once where it can.

        A step without requests, which follows the last one with any, brings what V2 copied late.
        """
        output = super().execute_model(scheduler_output)
        if self.use_v2_model_runner and scheduler_output.total_num_scheduled_tokens == 0:
            paths = self.model_runner.take_last_paths()
            outcome = StepOutcome(paths, self._draft_limit)
            return attach_outcome(copy(output), outcome) if paths else output
        has_masks = scheduler_output.has_structured_output_requests
        if output is None and self._takes_single_steps and not has_masks:
            return self.sample_tokens(None)
        return output

    # Until: vLLM carries a speculative method's own statistics from the worker to its loggers.
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Calls vLLM's; its output says what became of its trees, and which are next."""
        stats, drafts, drafting = self.model_runner.stats, None, None
        times, self.model_runner.step_times = self.model_runner.step_times, ()
        predicted: dict[str, Predicted] = {}
        is_told, branches = False, frozenset[str]()
        before = stats.drafting
        stats.steps += 1
        output = super().sample_tokens(grammar_output)
        proposer = self._proposer
        if self._takes_single_steps and output is not EMPTY_MODEL_RUNNER_OUTPUT:
            drafts = self.take_draft_token_ids() or DraftTokenIds([], [])
        if self.use_v2_model_runner:
            self.model_runner.drafting_clock.end()
            drafting = self.model_runner.drafting_clock.ended()
        else:
            foretold = proposer.foretold
            if foretold.counted:
                predicted = foretold.take_counts()
            is_told, foretold.has_branches = foretold.has_branches, False
            branches, foretold.masked = foretold.masked, branches
        if proposer.has_failed:
            self._draft_limit = 0
        paths, drafted = stats.take_paths(), stats.drafting - before
        outcome = StepOutcome(
            paths, self._draft_limit, proposer.has_failed, drafts, drafting, drafted, times,
            predicted, is_told, branches,
        )  # fmt: skip
        return attach_outcome(output, outcome)

    def sequoia_stats(self, reset: bool = False) -> dict[str, Any]:
        """Counters since the last reset (`StepStats.to_dict`); called by ``collective_rpc``."""
        counted = self.model_runner.stats.to_dict()
        if reset:
            self.model_runner.stats.reset()
        return counted

    def sequoia_limit_drafts(self, drafts: int) -> None:
        """Grows, and schedules, at most this many nodes from the next steps on (a prefix), and no
        branches of told tokens: a tool measures steps with trees."""
        self._proposer.max_drafts = self._draft_limit = drafts
        if not self.use_v2_model_runner:
            self._proposer.foretold.makes_branches = False

    @property
    def _proposer(self) -> Any:
        """The runner's: `TreeProposerV1` or `TreeProposerV2`."""
        runner = self.model_runner
        return runner.speculator if self.use_v2_model_runner else runner.drafter
