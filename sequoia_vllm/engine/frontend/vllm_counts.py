"""What vLLM counts and shows of our engines: the method's name, positions, requests, states."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common.settings import SequoiaSettings, is_tagged, without_speculation


def describe(original: Callable[..., str], self: Any) -> str:
    """Describes a configuration as vLLM does, but names the method as users do."""
    text = original(self)
    return text.replace(f"method='{self.method}'", "method='sequoia'") if is_tagged(self) else text


def init_acceptance_counters(
    original: Callable[..., None], self: Any, speculative_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Makes vLLM's counters with a position for each level of a tree, not for each node."""
    if is_tagged(speculative_config):
        depth = SequoiaSettings.on(speculative_config).tree.depth
        speculative_config = SimpleNamespace(num_speculative_tokens=depth)
    original(self, speculative_config, *args, **kwargs)


def hide_our_scheduler() -> None:
    """Keeps vLLM from warning of our scheduler as of a user's own; idempotent."""
    logging.getLogger("vllm.config.scheduler").addFilter(_is_not_about_ours)


def _is_not_about_ours(record: logging.LogRecord) -> bool:
    return "custom scheduler class sequoia_vllm." not in record.getMessage()


def check_budget(original: Callable[..., None], self: Any) -> None:
    """Checks as vLLM does, and keeps the number of requests (`lowers_active_requests`).

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


def slots_for_drafting(original: Callable[..., int], self: Any) -> int:
    """Counts slots as vLLM does; none for blocks of a Sequoia engine (`counts_blocks_as_rows`)."""
    blocks = is_tagged(self) and drafter(SequoiaSettings.on(self).drafter).in_one_pass
    return 0 if blocks else original(self)


def align_states(original: Callable[..., None], vllm_config: Any, backend: Any) -> None:
    """Sizes cache blocks as vLLM does, but for states that have no input for each draft."""
    if SequoiaSettings.enabled(vllm_config):
        vllm_config = without_speculation(vllm_config)
    original(vllm_config, backend)
