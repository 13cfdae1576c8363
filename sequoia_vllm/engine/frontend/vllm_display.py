"""vLLM's own log and metrics about our engines: the method's name, and positions by depth."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sequoia_vllm.engine.common.config_tag import is_tagged, tagged_depth


def describe(original: Callable[..., str], self: Any) -> str:
    """Describes a configuration as vLLM does, but names the method as users do."""
    text = original(self)
    return text.replace(f"method='{self.method}'", "method='sequoia'") if is_tagged(self) else text


def init_acceptance_counters(
    original: Callable[..., None], self: Any, speculative_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Makes vLLM's counters with a position for each level of a tree, not for each node."""
    if is_tagged(speculative_config):
        depth = tagged_depth(speculative_config)
        speculative_config = SimpleNamespace(num_speculative_tokens=depth)
    original(self, speculative_config, *args, **kwargs)


def hide_our_scheduler() -> None:
    """Keeps vLLM from warning of our scheduler as of a user's own; idempotent."""
    logging.getLogger("vllm.config.scheduler").addFilter(_is_not_about_ours)


def _is_not_about_ours(record: logging.LogRecord) -> bool:
    return "custom scheduler class sequoia_vllm." not in record.getMessage()
