"""Goes on without a draft that fails while requests run."""

import logging
import sys
from typing import Any

logger = logging.getLogger("vllm.sequoia")


def survive_draft(vllm_config: Any) -> None:
    """Says that an engine goes on without speculation; called where a draft's error is caught.

    Raises:
        Exception: The same error, where several ranks draft: the others wait for this one.
    """
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        raise
    logger.exception(
        "Sequoia: the draft model failed (%s), and this engine drafts no more: answers stay right, "
        "at the speed of plain vLLM. sequoia:draft_failures counts it; restart the engine to draft",
        repr(sys.exc_info()[1]).splitlines()[0][:200],
    )
