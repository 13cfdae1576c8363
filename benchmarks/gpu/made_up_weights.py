"""Replaces vLLM's loader of ``load_format="dummy"``: heads keep their own output layer.

vLLM lets a head share the target's output layer unless the head's checkpoint has one, and nothing
is loaded where weights are made up. A level would then read 1.05 GB for the 128,256 tokens of
Llama 3 instead of 0.26 GB for the 32,000 of its head.
"""

from typing import Any

from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


@register_model_loader("dummy")
class MadeUpWeights(DummyModelLoader):
    """vLLM's `DummyModelLoader`; processes that load models import this module."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Makes all weights up."""
        super().load_weights(model, model_config)
        if getattr(model, "draft_id_to_target_id", None) is not None:
            model.has_own_lm_head = True
