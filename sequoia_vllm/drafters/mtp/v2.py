"""MTP layers on Model Runner V2."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sequoia_vllm.drafters.eagle3.v2 import LevelHeadDrafter
from sequoia_vllm.drafters.mtp import HY4, SPARSE
from sequoia_vllm.engine.common.patched import patched


class LayerDrafter(LevelHeadDrafter):
    """Reads the target's last states as they are: such a layer has their width."""

    def load(self, target_model: torch.nn.Module, target_layers: set[str]) -> torch.nn.Module:
        """See `TreeDrafter.load`; a sparse layer is loaded as one that attends to all tokens."""
        config = self.chains.speculative_config
        if config.draft_model_config.architectures[0] not in SPARSE:
            return super().load(target_model, target_layers)
        _read_as_dense(config.draft_model_config)
        if self.chains.vllm_config.attention_config.backend is not None:  # the user's, for sparse
            config.attention_backend = AttentionBackendEnum.TRITON_MLA
        # Until: vLLM's class leaves out weights that a layer without an indexer does not have.
        with patched(DeepSeekMTP, "load_weights", _load_without_indexer):
            return super().load(target_model, target_layers)

    def layers_read(self, target_model: torch.nn.Module) -> int:
        """See `HeadDrafter.layers_read`."""
        return 1

    def states_read(self, last: Tensor, auxiliary: list[Tensor] | None) -> list[Tensor]:
        """See `HeadDrafter.states_read`."""
        return [last]

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.combine_hidden_states`."""
        return target_states


def _read_as_dense(draft: Any) -> None:
    """Makes vLLM build the layer without an indexer: Hy4's, or DeepSeek V3's, which is the same.

    A draft may attend to more than it was trained for: verification keeps the target's law. Up to
    ``index_topk`` tokens both are the same. Beyond, an indexer in each of a tree's levels would
    need DeepGEMM's plan for it, and save the reading of one layer's latents.
    """
    if draft.architectures[0] == HY4:
        draft.hf_config.layer_types = ["full_attention"] * draft.hf_config.num_hidden_layers
        return
    fields = draft.hf_config.to_dict()
    dense = DeepseekV3Config(**{k: v for k, v in fields.items() if not k.startswith("index_")})
    dense.model_type, dense.architectures = draft.hf_config.model_type, ["DeepSeekMTPModel"]
    draft.hf_config = draft.hf_text_config = dense
    draft.model_arch_config.architectures = dense.architectures


_load_weights = DeepSeekMTP.load_weights


def _load_without_indexer(self: DeepSeekMTP, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    return _load_weights(self, ((name, one) for name, one in weights if ".indexer." not in name))
