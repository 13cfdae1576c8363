"""The target that a head learns from: its hidden states, distributions and embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache


@dataclass(frozen=True)
class Frozen:
    """What the target says of a batch of texts.

    Attributes:
        features: The hidden states of the chosen layers behind each other,
            ``[batch, tokens, layers × hidden]``.
        log_probabilities: Of the token after each, ``[batch, tokens, vocabulary]``, float32.
    """

    features: torch.Tensor
    log_probabilities: torch.Tensor


class FrozenTarget:
    """A Llama model in evaluation mode, whose layers are listened to.

    Args:
        folder: The target's.
        layers: 0 is the embedding, n the output of the n-th layer with the
            residual added, before any norm: vLLM's numbers.
        device: Where it runs.
        dtype: Of its weights.
    """

    def __init__(
        self,
        folder: Path,
        layers: Sequence[int],
        device: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval().requires_grad_(False)
        self._layers = tuple(layers)
        self._outputs: dict[int, torch.Tensor] = {}
        modules = [model.model.embed_tokens, *model.model.layers]
        for layer in self._layers:
            modules[layer].register_forward_hook(self._remember(layer))

    @property
    def config(self) -> LlamaConfig:
        return self._model.config

    @property
    def final_norm(self) -> torch.Tensor:
        """The weight of the norm before the output, ``[hidden]``."""
        return self._model.model.norm.weight

    @property
    def output_embedding(self) -> torch.Tensor:
        """Shape ``[vocabulary, hidden]``."""
        return self._model.lm_head.weight

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embedding that the heads share, ``[…, hidden]``."""
        return functional.embedding(tokens, self._model.model.embed_tokens.weight)

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> Frozen:
        """What it says of texts of shape ``[batch, tokens]``."""
        logits = self._model(tokens, use_cache=False).logits
        features = torch.cat([self._outputs[layer] for layer in self._layers], -1)
        return Frozen(features, logits.float().log_softmax(-1))

    @torch.no_grad()
    def write(
        self, beginnings: torch.Tensor, count: int, temperatures: torch.Tensor
    ) -> torch.Tensor:
        """Texts with ``count`` tokens more, ends of texts or not.

        Args:
            beginnings: Shape ``[batch, length]``.
            count: Tokens to add.
            temperatures: Of each text, ``[batch]``; 0 takes the most likely token.

        Returns:
            Shape ``[batch, length + count]``.
        """
        length = beginnings.shape[1] + count
        cache = StaticCache(config=self.config, max_cache_len=length)
        latest, texts = beginnings, [beginnings]
        for _ in range(count):
            logits = self._model(latest, past_key_values=cache, use_cache=True, logits_to_keep=1)
            latest = _sample(logits.logits[:, -1].float(), temperatures)[:, None]
            texts.append(latest)
        return torch.cat(texts, 1)

    def continue_greedily(self, prompts: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Prompts of shape ``[batch, length]``, each with at most ``count`` tokens more.

        A text ends before the first token that ends one.
        """
        greedy = torch.zeros(len(prompts), device=prompts.device)
        tokens = self.write(prompts, count, greedy)
        ends = tokens[:, prompts.shape[1] :] == self.config.eos_token_id
        kept = (ends.cumsum(-1) == 0).sum(-1) + prompts.shape[1]
        return [row[:length] for row, length in zip(tokens, kept.tolist(), strict=True)]

    def _remember(self, layer: int) -> Any:
        """A hook that keeps a layer's output."""

        def hook(module: object, inputs: object, output: torch.Tensor) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook


def _sample(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """A token of each row of ``[batch, vocabulary]``, by the exponential race."""
    scaled = logits / temperatures.clamp(min=1e-6)[:, None]
    noise = -torch.empty_like(logits).exponential_().log()
    return torch.where(temperatures[:, None] > 0, scaled + noise, logits).argmax(-1)
