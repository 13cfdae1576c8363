"""Sequoia tree speculative decoding for vLLM (arXiv 2402.12374)."""

from pkgutil import resolve_name
from typing import Any

from sequoia_vllm.orphans import die_with_parent

__version__ = "0.2.0"

die_with_parent()


def __getattr__(name: str) -> Any:
    """Gives ``--middleware sequoia_vllm.predicted_outputs`` its class, which needs vLLM."""
    if name != "predicted_outputs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name("sequoia_vllm.engine.frontend.predicted_outputs:PredictedOutputs")
