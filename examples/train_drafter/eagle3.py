"""An EAGLE-3 head: one layer that drafts token after token from the target's hidden states.

The names of its weights and the order of its norms are those of vLLM's
``llama_eagle3``. At position p the layer reads the token at p + 1 and a hidden
state of p, and predicts the token at p + 2. Where the target has been, the
hidden state is a map of the target's; further on it is what the layer itself
gave one position before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from training import cross_entropies, split
from transformers import AutoModelForCausalLM, LlamaConfig

from sequoia_vllm.errors import SequoiaError

UNROLLED_STEPS = 5  # drafts of a chain in training
STEP_WEIGHT = 0.8  # of a draft's loss, relative to that of the draft before
INITIAL_DEVIATION = 0.02  # as Llama's


class FrozenTarget:
    """A model of Llama's or Qwen's form in evaluation mode, or SequoiaError: its layers are heard.

    Layer 0 is the embedding, n the output of the n-th layer with the residual added, before any
    norm: vLLM's numbers. Hidden states are computed again for each batch and not stored: those of
    three layers of SmolLM2 take 3.4 kB a token, which is 4 GB for a million tokens.
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
            raise SequoiaError(
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
        """Hidden states of the chosen layers behind each other, ``[batch, tokens, layers ×
        hidden]``, for texts ``[batch, tokens]``. What follows a text changes nothing."""
        self._model.model(tokens, use_cache=False)
        return torch.cat([self._outputs.pop(layer) for layer in self._layers], -1)

    def _remember(self, layer: int) -> Any:

        def hook(module: object, inputs: object, output: torch.Tensor) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook


class Linear(nn.Linear):
    """A map without a bias, drawn as Llama's are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=INITIAL_DEVIATION)


class Eagle3(nn.Module):
    """The head, without the target's embedding, which it shares. It sees the hidden states of these
    layers: 0 is the embedding, n the output of the n-th layer. Tokens that it drafts ascend."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(
        self, target: LlamaConfig, layers: tuple[int, ...], mlp: int, draft_tokens: torch.Tensor
    ) -> None:
        super().__init__()
        hidden = target.hidden_size
        self.target, self.target_layers, self.mlp_size = target, layers, mlp
        self.fc = Linear(hidden * len(layers), hidden)
        self.midlayer = Eagle3Layer(target, mlp)
        self.norm = nn.RMSNorm(hidden, eps=target.rms_norm_eps)
        self.lm_head = Linear(hidden, len(draft_tokens))
        drafted = torch.zeros(target.vocab_size, dtype=torch.bool)
        drafted[draft_tokens] = True
        self.register_buffer("d2t", draft_tokens - torch.arange(len(draft_tokens)))
        self.register_buffer("t2d", drafted)

    @property
    def draft_tokens(self) -> torch.Tensor:
        """The target's number of every draft token."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def start_from(self, target: FrozenTarget) -> None:
        """Lets the head begin with what it shares with the target: its output side."""
        with torch.no_grad():
            self.norm.weight.copy_(target.final_norm)
            self.lm_head.weight.copy_(target.output_embedding[self.draft_tokens])
            # The last layer's hidden states, as they are.
            hidden = self.target.hidden_size
            self.fc.weight[:, -hidden:] += torch.eye(hidden, device=self.fc.weight.device)

    def config(self) -> dict[str, object]:
        """What vLLM reads as ``config.json``."""
        names = (
            "vocab_size", "hidden_size", "num_attention_heads", "hidden_act",
            "max_position_embeddings", "rms_norm_eps", "pad_token_id", "bos_token_id",
            "eos_token_id",
        )  # fmt: skip
        theta = self.target.rope_parameters["rope_theta"]
        return {
            **{name: getattr(self.target, name, None) for name in names},
            "head_dim": head_size(self.target),
            # Without the scaling that a target may have: a head is trained without it.
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            "num_key_value_heads": self.target.num_attention_heads,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "intermediate_size": self.mlp_size,
            "draft_vocab_size": len(self.d2t),
            "norm_before_residual": False,
            # vLLM's runner reads the first of the two, its model the second.
            "eagle_aux_hidden_state_layer_ids": list(self.target_layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.target_layers),
            },
        }

    def loss(self, target: FrozenTarget, texts: torch.Tensor) -> torch.Tensor:
        """Cross-entropy with the target's distribution, in chains on the head's own states."""
        tokens, likely, shares = split(texts)
        answered = shares.sum(-1) > 0
        starts = tokens.shape[1] - UNROLLED_STEPS
        chains = Chains(self, target, target(tokens)[:, :starts])
        total = torch.zeros((), device=texts.device)
        for step in range(UNROLLED_STEPS):
            ahead = slice(step + 1, step + 1 + starts)
            at = answered[:, ahead]
            logits = self.lm_head(chains.extend(tokens[:, ahead])[at])
            losses = cross_entropies(logits, likely[:, ahead][at], shares[:, ahead][at])
            total = total + STEP_WEIGHT**step * losses.sum() / max(1, len(losses))
        return total / sum(STEP_WEIGHT**step for step in range(UNROLLED_STEPS))

    @torch.no_grad()
    def draft(
        self, target: FrozenTarget, tokens: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely chain after every prefix of one text ``[length]``, and the first drafts'
        logits ``[length - 1, draft vocabulary]``. Row s of ``[length - 1, count]`` drafts the
        tokens from s + 2 on, with the target's hidden states of tokens 0 to s."""
        chains = Chains(self, target, target(tokens[None])[:, :-1])
        drafts, logits = [tokens[None, 1:]], []
        for _ in range(count):
            logits.append(self.lm_head(chains.extend(drafts[-1])))
            drafts.append(self.draft_tokens[logits[-1].argmax(-1)])
        return torch.cat(drafts[1:]).T, logits[0][0]


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention also reads the embedding of the next token."""

    def __init__(self, target: LlamaConfig, mlp: int) -> None:
        super().__init__()
        hidden, epsilon = target.hidden_size, target.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.hidden_norm = nn.RMSNorm(hidden, eps=epsilon)
        width = head_size(target) * target.num_attention_heads
        self.self_attn = nn.ModuleDict(
            {name: Linear(2 * hidden, width) for name in ("q_proj", "k_proj", "v_proj")}
        )
        self.self_attn["o_proj"] = Linear(width, hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.mlp = nn.ModuleDict({name: Linear(hidden, mlp) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = Linear(mlp, hidden)

    def gated(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden, mlp = self.post_attention_layernorm(hidden), self.mlp
        return mlp["down_proj"](functional.silu(mlp["gate_proj"](hidden)) * mlp["up_proj"](hidden))


class Chains:
    """Drafts after every position of a batch of texts, all extended by a token at a time. The chain
    of position s attends to what the head made of the target's states of positions 0 to s,
    ``[batch, starts, layers × hidden]``, and to its own tokens at s + 1 and so on."""

    def __init__(self, head: Eagle3, target: FrozenTarget, features: torch.Tensor) -> None:
        self._head, self._target = head, target
        self._starts = torch.arange(features.shape[1], device=features.device)
        self._hidden = head.fc(features).float()
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed states ``[batch, starts, hidden]`` that predict the tokens after these, one of
        each chain, ``[batch, starts]``."""
        head, layer = self._head, self._head.midlayer
        embedded = layer.input_layernorm(self._target.embed(tokens))
        mixed = torch.cat((embedded, layer.hidden_norm(self._hidden)), -1)
        hidden = self._hidden + self._attend(mixed)
        # Before the norm: what the next step continues from.
        self._hidden = hidden + layer.gated(hidden)
        return head.norm(self._hidden)

    def _attend(self, mixed: torch.Tensor) -> torch.Tensor:
        attention = self._head.midlayer.self_attn
        target = self._head.target
        size, theta = head_size(target), target.rope_parameters["rope_theta"]
        query, key, value = (
            attention[name](mixed).unflatten(-1, (-1, size)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        positions = self._starts + len(self._keys)
        query, key = (rotate(heads, positions, theta) for heads in (query, key))
        self._keys.append(key)
        self._values.append(value)
        weights = self._weights(query * size**-0.5).to(value.dtype)
        shared = len(self._starts)
        attended = weights[..., :shared] @ self._values[0]
        for step, own in enumerate(self._values[1:]):
            attended = attended + weights[..., shared + step, None] * own
        return attention["o_proj"](attended.transpose(1, 2).flatten(2))

    def _weights(self, query: torch.Tensor) -> torch.Tensor:
        """Attention's weights, ``[batch, heads, starts, starts + own tokens]``, float32."""
        scores = (query @ self._keys[0].transpose(-1, -2)).float()
        later = self._starts[None] > self._starts[:, None]
        own = [(query * key).sum(-1, keepdim=True).float() for key in self._keys[1:]]
        return functional.softmax(
            torch.cat((scores.masked_fill(later, -torch.inf), *own), -1), dim=-1
        )


def head_size(target: LlamaConfig) -> int:
    """Numbers of one attention head."""
    found: int = getattr(target, "head_dim", None) or (
        target.hidden_size // target.num_attention_heads
    )
    return found


def rotate(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Llama's rotary embedding of queries or keys ``[batch, heads, tokens, size]`` at positions
    ``[tokens]``: dimension i turns with i + size / 2; ``theta`` is the frequencies' base."""
    half = heads.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=heads.device) / half)
    angles = positions[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    first, second = heads.float().split(half, -1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    return turned.to(heads.dtype)
