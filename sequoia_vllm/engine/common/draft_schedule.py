"""How many drafts each batch size gets, by the engine's limits, and the room that they need."""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common.settings import SequoiaSettings, is_tagged, without_speculation
from sequoia_vllm.engine.offload import is_offloaded
from sequoia_vllm.hardware.budget import beyond_budget, drafts_by_batch, fit_to_budget, rungs
from sequoia_vllm.hardware.graph_sizes import MOST_TOKENS, capture_sizes, first_beyond, last_with

logger = logging.getLogger("vllm.sequoia")

# Beginnings of lines that vLLM logs. The first asks to draft less, to leave prompts room: trees
# leave them half of the token budget, and our own log says how. The second advises Model Runner V2
# for its CUDA graphs: GPUs have it, and CPUs have no graphs.
MISLEADING = (
    "max_num_scheduled_tokens is set to",
    "Dynamic speculative decoding changes the target verification",
)
# While an engine is configured: whether its schedule is the user's.
IS_USERS: ContextVar[bool | None] = ContextVar("is_users", default=None)
"""Whether to keep the schedule where vLLM's check of a configuration calls `plan_schedule`; None:
it does not."""


def token_budget(scheduler_config: Any) -> int:
    """Tokens per step that the scheduler hands out."""
    budget: int | None = scheduler_config.max_num_scheduled_tokens
    return budget or int(scheduler_config.max_num_batched_tokens)


def scheduled_drafts(vllm_config: Any) -> list[int]:
    """Drafts per request that the engine's schedule has for batches of 1, 2, ... requests."""
    speculative = vllm_config.speculative_config
    return drafts_by_batch(
        speculative.num_speculative_tokens_per_batch_size,
        speculative.num_speculative_tokens,
        vllm_config.scheduler_config.max_num_seqs,
    )


def fewer_drafts(vllm_config: Any) -> list[int]:
    """Numbers of drafts that an engine may change over to, see `rungs`; none if it is frozen."""
    if SequoiaSettings.of(vllm_config).adapts_as is None:
        return []
    return rungs(scheduled_drafts(vllm_config), between=not vllm_config.use_v2_model_runner)


def reachable_drafts(vllm_config: Any) -> list[int]:
    """Drafts per request that an engine may ever have, for batches of 1, 2, ... requests.

    Engines that adapt may exceed their schedule: on V1 up to the token budget, on V2, which
    captures graphs, for twice the requests of the schedule.
    """
    schedule = scheduled_drafts(vllm_config)
    if SequoiaSettings.of(vllm_config).adapts_as is None:
        return schedule
    drafts = vllm_config.speculative_config.num_speculative_tokens
    limits = vllm_config.scheduler_config
    budget, offloaded = token_budget(limits), is_offloaded(vllm_config)
    fitting = fit_to_budget([(1, 1, drafts)], drafts, limits.max_num_seqs, budget, offloaded)
    most = drafts_by_batch(fitting, drafts, limits.max_num_seqs)
    if vllm_config.use_v2_model_runner:
        last = {number: 2 * last_with(number, schedule) for number in fewer_drafts(vllm_config)}
        most = [
            max((number for number in last if number <= room and batch <= last[number]), default=0)
            for batch, room in enumerate(most, start=1)
        ]
    return list(map(max, schedule, most))


def check_schedule(original: Callable[..., None], self: Any) -> None:
    """Keeps schedules of trees with data parallelism, where vLLM's own check takes them away.

    vLLM's replicas meet in each drafting pass; ours meet in none. vLLM repeats the check where it
    copies a configuration for a draft, and at the end of an engine core's start.
    """
    if not SequoiaSettings.enabled(self):
        original(self)
        return
    logging.getLogger("vllm.config.vllm").addFilter(is_fitting)  # once, however often
    if (is_users := IS_USERS.get()) is not None:
        plan_schedule(self, keep_schedule=is_users)


def is_fitting(record: logging.LogRecord) -> bool:
    """Whether a log line of vLLM's about drafts may be shown: it is none of `MISLEADING`."""
    return not record.getMessage().startswith(MISLEADING)


def plan_schedule(vllm_config: Any, keep_schedule: bool) -> None:
    """Fits the schedule of a Sequoia engine to its token budget, and CUDA graphs to the schedule.

    Called while vLLM checks its configuration. A schedule of the user's is kept: only warn.
    """
    speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    speculative.num_speculative_tokens = SequoiaSettings.of(vllm_config).tree.num_speculative_tokens
    schedule = [tuple(entry) for entry in speculative.num_speculative_tokens_per_batch_size]
    budget = token_budget(scheduler)
    limits = speculative.num_speculative_tokens, scheduler.max_num_seqs
    if not keep_schedule:
        offloaded = is_offloaded(vllm_config)
        fitting = fit_to_budget(schedule, *limits, budget, offloaded)
        if fitting != schedule:
            logger.info(
                "Sequoia: drafts by batch size, so that %d requests of up to %d drafts leave room "
                "for prompts in max_num_batched_tokens=%d: %s",
                limits[1], limits[0], budget,
                ", ".join(f"{first} to {last}: {count}" for first, last, count in fitting),
            )  # fmt: skip
        speculative.num_speculative_tokens_per_batch_size = schedule = fitting
    elif beyond := beyond_budget(schedule, *limits, budget):
        logger.warning(
            "Sequoia: at batch size %d the given schedule takes %d tokens per step, of "
            "max_num_batched_tokens=%d: running requests will wait for each other, and prompts "
            "for them. Draft less at large batch sizes, or raise the budget.",
            *beyond, budget,
        )  # fmt: skip
    graphs = vllm_config.compilation_config
    is_users = graphs.cudagraph_capture_sizes is not None
    if vllm_config.use_v2_model_runner and not (is_users or graphs.max_cudagraph_capture_size):
        tokens = [count + 1 for count in drafts_by_batch(schedule, *limits)]
        most = [count + 1 for count in reachable_drafts(vllm_config)]
        graphs.cudagraph_capture_sizes = capture_sizes(most, scheduler.max_num_batched_tokens)
        uncaptured = first_beyond(tokens, MOST_TOKENS)
        if uncaptured and not vllm_config.model_config.enforce_eager:
            logger.info(
                "Sequoia: batches from %d requests on are scored without CUDA graphs: their trees "
                "take more than %d tokens, whose arithmetic takes longer than their launches",
                uncaptured, MOST_TOKENS,
            )  # fmt: skip


def check_budget(original: Callable[..., None], self: Any) -> None:
    """Checks as vLLM does, and keeps the number of requests (`counts_blocks_as_rows`).

    For a pass over blocks vLLM sets a row aside for each draft of every request. Trees' passes have
    a row for each level. vLLM lowers the number where a configuration is copied, too.
    """
    if not SequoiaSettings.enabled(self):
        original(self)
        return
    scheduler = self.scheduler_config
    users, scheduler.max_num_active_seqs = scheduler.max_num_active_seqs, 1
    try:
        original(self)
    finally:
        scheduler.max_num_active_seqs = users


def drafting_slots(original: Callable[..., int], self: Any) -> int:
    """Counts slots as vLLM does; none for blocks of a Sequoia engine (`counts_blocks_as_rows`)."""
    blocks = is_tagged(self) and drafter(SequoiaSettings.on(self).drafter).in_one_pass
    return 0 if blocks else original(self)


def align_states(original: Callable[..., None], vllm_config: Any, backend: Any) -> None:
    """Sizes cache blocks as vLLM does, but for states that have no input for each draft."""
    if SequoiaSettings.enabled(vllm_config):
        vllm_config = without_speculation(vllm_config)
    original(vllm_config, backend)
