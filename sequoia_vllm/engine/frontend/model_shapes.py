"""The shapes of an engine's two models, from the configurations that vLLM reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.transformers_utils.config import get_hf_text_config

from sequoia_vllm.drafters import DrafterKind, HeadKind
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend.draft_config import DraftReader
from sequoia_vllm.hardware.model_config import ShapeError, read_shape
from sequoia_vllm.hardware.models import ModelShape, PairShapes


def pair_shapes(draft: str, reader: DraftReader, drafter: DrafterKind = "model") -> PairShapes:
    """What vLLM's configuration of the target, and the draft's own, say of their sizes.

    Args:
        draft: Name or path of the draft.
        reader: Of the engine.
        drafter: What the draft is.
    """
    problems: list[str] = []
    target, quantization = reader.target, reader.config.draft_keys().get("quantization")
    head: HeadKind | None = None if drafter == "model" else drafter

    def read(shape: Callable[[], ModelShape]) -> ModelShape | None:
        try:
            return shape()
        except ShapeError as error:
            problems.append(str(error))
            return None

    return PairShapes(
        target=read(lambda: read_shape(target.hf_text_config, target.model, target.quantization)),
        draft=read(
            lambda: read_shape(_draft_text_config(draft, reader), draft, quantization, head)
        ),
        head=head,
        problem="; ".join(problems) or None,
    )


def head_shape(vllm_config: Any) -> ModelShape | None:
    """The shape of an engine's head; None: its draft is a model."""
    kind = SequoiaSettings.of(vllm_config).drafter
    if kind == "model":
        return None
    draft = vllm_config.speculative_config.draft_model_config
    return read_shape(draft.hf_text_config, draft.model, draft.quantization, kind)


def _draft_text_config(draft: str, reader: DraftReader) -> Any:
    """The draft's."""
    try:
        return get_hf_text_config(reader.read(draft))
    except (OSError, ValueError, RuntimeError) as error:
        # vLLM reads it again right after this, and then says what the user should do.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ShapeError(f"cannot read the configuration of {draft}: {first}") from error
