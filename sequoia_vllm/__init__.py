"""Sequoia tree speculative decoding for vLLM (arXiv 2402.12374)."""

from pkgutil import resolve_name
from typing import Any

from sequoia_vllm.orphans import die_with_parent

__version__ = "0.2.0"

_NEED_VLLM = {
    "predicted_outputs": "PredictedOutputs", "prediction_counts": "prediction_counts",
}  # fmt: skip

die_with_parent()


def __getattr__(name: str) -> Any:
    """Gives what needs vLLM: ``--middleware sequoia_vllm.predicted_outputs``, and
    `prediction_counts`."""
    if (found := _NEED_VLLM.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"sequoia_vllm.engine.frontend.predicted_outputs:{found}")
