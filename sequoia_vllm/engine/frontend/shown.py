"""What vLLM's own log and metrics say of our engines."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sequoia_vllm.engine.common.config_tag import is_tagged, tagged_depth


def describe(original: Callable[..., str], self: Any) -> str:
    """As vLLM's speculative configuration says it; the method is named as users name it."""
    text = original(self)
    return text.replace(f"method='{self.method}'", "method='sequoia'") if is_tagged(self) else text


def init_acceptance_counters(
    original: Callable[..., None], self: Any, speculative_config: Any, *args: Any, **kwargs: Any
) -> None:
    """As vLLM's, with a counter of accepted positions for each level of a tree, not each node."""
    if is_tagged(speculative_config):
        depth = tagged_depth(speculative_config)
        speculative_config = SimpleNamespace(num_speculative_tokens=depth)
    original(self, speculative_config, *args, **kwargs)


def make_stats(
    original: Callable[..., Any], self: Any, spec_decoding_stats: Any = None, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """As the scheduler's; accepted positions end where the tree does."""
    speculative_config = self.vllm_config.speculative_config
    if spec_decoding_stats is not None and is_tagged(speculative_config):
        del spec_decoding_stats.num_accepted_tokens_per_pos[tagged_depth(speculative_config) :]
    return original(self, spec_decoding_stats, *args, **kwargs)
