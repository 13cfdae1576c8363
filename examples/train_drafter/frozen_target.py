"""The target that a head learns from: its hidden states, embedding and output layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from errors import PairError
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig


class FrozenTarget:
    """A model of Llama's or Qwen's form in evaluation mode, whose layers are listened to.

    Hidden states are computed again for each batch and not stored: those of three layers of
    SmolLM2 take 3.4 kB a token, which is 4 GB for a million tokens.

    Args:
        folder: The target's.
        layers: 0 is the embedding, n the output of the n-th layer with the
            residual added, before any norm: vLLM's numbers.
        device: Where it runs.
        dtype: Of its weights.

    Raises:
        PairError: If its modules do not have the names of Llama's.
    """

    def __init__(
        self, folder: Path, layers: Sequence[int], device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval().requires_grad_(False)
        self._layers = tuple(layers)
        self._outputs: dict[int, torch.Tensor] = {}
        try:
            modules = [model.model.embed_tokens, *model.model.layers]
            self.output_embedding: torch.Tensor = model.lm_head.weight
            """Shape ``[vocabulary, hidden]``."""
            self.final_norm: torch.Tensor = model.model.norm.weight
            """The weight of the norm before the output, ``[hidden]``."""
        except AttributeError as error:
            raise PairError(
                f"{folder}: heads are trained for targets of Llama's and Qwen's form ({error})"
            ) from error
        for layer in self._layers:
            modules[layer].register_forward_hook(self._remember(layer))

    @property
    def config(self) -> LlamaConfig:
        return self._model.config

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embedding that the heads share, float32 ``[…, hidden]``."""
        return functional.embedding(tokens, self._model.model.embed_tokens.weight).float()

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states of the chosen layers behind each other.

        Args:
            tokens: Texts of shape ``[batch, tokens]``. What follows a text changes nothing.

        Returns:
            Shape ``[batch, tokens, layers × hidden]``.
        """
        self._model.model(tokens, use_cache=False)
        return torch.cat([self._outputs.pop(layer) for layer in self._layers], -1)

    def _remember(self, layer: int) -> Any:
        """A hook that keeps a layer's output."""

        def hook(module: object, inputs: object, output: torch.Tensor) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook
