"""What vLLM logs about configurations with drafts, and what of it misleads with trees."""

from __future__ import annotations

import logging

# Beginnings of lines. The first asks to draft less, to leave prompts room: trees leave them half
# of the token budget, and our own log says how. The second advises Model Runner V2 for its CUDA
# graphs: GPUs have it, and CPUs have no graphs.
MISLEADING = (
    "max_num_scheduled_tokens is set to",
    "Dynamic speculative decoding changes the target verification",
)


class _Advice(logging.Filter):
    """Passes all lines but those in `MISLEADING`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        return not record.getMessage().startswith(MISLEADING)


_ADVICE = _Advice()


def drop_misleading_advice() -> None:
    """Keeps vLLM from logging `MISLEADING` lines from now on; harmless when called again."""
    logging.getLogger("vllm.config.vllm").addFilter(_ADVICE)
