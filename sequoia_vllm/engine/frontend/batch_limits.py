"""Lets as many requests run at once as users ask for.

For a pass over blocks vLLM sets a row aside for each draft of every request. Trees' passes have a
row for each level, and `DraftPlan` says how many requests take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sequoia_vllm.engine.common.config_tag import is_tagged
from sequoia_vllm.engine.common.settings import SequoiaSettings


def check_budget(original: Callable[..., None], self: Any) -> None:
    """Checks as vLLM does, and keeps the number of requests (`lowers_active_requests`).

    Versions that lower it do so where a configuration is copied, too, for a draft in the engine
    core's process.
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
    if is_tagged(self) and (self.use_dflash() or self.use_dspark()):
        return 0
    return original(self)
