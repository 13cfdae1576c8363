"""A DFlash head: drafts a whole block in one pass, without a causal mask.

The names of its weights and the order of its norms are those of vLLM's
``qwen3_dflash``. Keys and values of the text are made from the target's hidden
states alone. The block's queries are the text's last token, which the target
has not read yet, and mask tokens; each mask becomes the draft of its position.
"""

import torch
from answers import cross_entropies, split
from frozen_target import FrozenTarget
from head_layers import (
    GatedMLP,
    Linear,
    attention_sizes,
    join_heads,
    rotate,
    shared_config,
    split_heads,
)
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

BLOCK = 8  # the last token and at most seven drafts
LAYER_COUNT = 2
BLOCKS_OF_TEXT = 32  # drafted in a training text
FULL_BLOCKS = 0.5  # of those in training; the others are shorter, as a user may ask
DEPTH_WEIGHT = 0.8  # of a draft's loss, relative to that of the draft before


class DFlash(nn.Module):
    """The head, without the target's embedding and output, which it shares.

    Args:
        layers: Of the target: 0 is its embedding, n the output of its n-th
            layer. The head sees their hidden states.
        mlp: Size of each layer's MLP.
        mask: The token that stands for what is drafted.
    """

    def __init__(self, target: LlamaConfig, layers: tuple[int, ...], mlp: int, mask: int) -> None:
        super().__init__()
        if min(layers) < 1:
            raise ValueError(f"layers {layers}: DFlash has no number for the embedding")
        hidden, epsilon = target.hidden_size, target.rms_norm_eps
        self.target, self.target_layers, self.mlp_size, self.mask = target, layers, mlp, mask
        self.fc = Linear(hidden * len(layers), hidden)
        self.hidden_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.layers = nn.ModuleList(DFlashLayer(target, mlp) for _ in range(LAYER_COUNT))
        self.norm = nn.RMSNorm(hidden, eps=epsilon)

    def start_from(self, target: FrozenTarget) -> None:
        """Lets the head begin with the norm of the output that it shares."""
        with torch.no_grad():
            self.norm.weight.copy_(target.final_norm)

    def config(self) -> dict[str, object]:
        """What vLLM reads as ``config.json``."""
        return {
            **shared_config(self.target),
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": LAYER_COUNT,
            "intermediate_size": self.mlp_size,
            "block_size": BLOCK,
            "dflash_config": {
                "mask_token_id": self.mask,
                # Here the output of the first layer is 0.
                "target_layer_ids": [layer - 1 for layer in self.target_layers],
            },
        }

    def loss(self, target: FrozenTarget, texts: torch.Tensor) -> torch.Tensor:
        """Cross-entropy with the target's distribution, early drafts weighing more.

        In training the blocks begin anywhere and half of them are short; in
        validation they are full and spread evenly.
        """
        tokens, likely, shares = split(texts)
        anchors, counts = self._blocks(tokens)
        states = self.states(target, tokens, target(tokens), anchors, counts, BLOCK - 1)
        depths = torch.arange(BLOCK - 1, device=texts.device)
        # The distribution after a token is that of the position behind it.
        before = (anchors[..., None] + depths).flatten(1)
        likely, shares = (
            _rows(rows, before).unflatten(1, (-1, BLOCK - 1)) for rows in (likely, shares)
        )
        weights = DEPTH_WEIGHT**depths * (depths < counts[..., None]) * (shares.sum(-1) > 0)
        chosen = weights > 0
        logits = functional.linear(states[chosen], target.output_embedding)
        losses = cross_entropies(logits, likely[chosen], shares[chosen])
        return (weights[chosen] * losses).sum() / weights.sum().clamp(min=1)

    @torch.no_grad()
    def draft(
        self, target: FrozenTarget, tokens: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely block after every prefix of one text.

        Args:
            tokens: The text, shape ``[length]``.

        Returns:
            Shape ``[length - 1, count]``: row s drafts the tokens from s + 2 on, with
            the target's hidden states of tokens 0 to s. The first drafts' logits,
            ``[length - 1, vocabulary]``.
        """
        anchors = torch.arange(1, len(tokens), device=tokens.device)[None]
        counts = torch.full_like(anchors, count)
        [states] = self.states(target, tokens[None], target(tokens[None]), anchors, counts, count)
        logits = [functional.linear(one, target.output_embedding) for one in states.unbind(1)]
        return torch.stack([one.argmax(-1) for one in logits], -1), logits[0]

    def states(
        self, target: FrozenTarget, tokens: torch.Tensor, features: torch.Tensor,
        anchors: torch.Tensor, counts: torch.Tensor, width: int,
    ) -> torch.Tensor:  # fmt: skip
        """Normed states of what every block drafts.

        Args:
            target: The head's, for the embedding.
            features: The target's states of them, ``[batch, length, layers × hidden]``.
            anchors: Positions of the blocks' first tokens, ``[batch, blocks]``. A
                block sees the target's states of the positions before.
            counts: Masks of the blocks, ``[batch, blocks]``.
            width: The most masks.

        Returns:
            Shape ``[batch, blocks, width, hidden]``; what lies behind a block's masks
            means nothing.
        """
        inputs = torch.full((*anchors.shape, width + 1), self.mask, device=tokens.device)
        inputs[..., 0] = tokens.gather(1, anchors)
        context = self.hidden_norm(self.fc(features).float())
        places = Places(anchors, counts, width, features.shape[1])
        hidden = target.embed(inputs).flatten(1, 2)
        for layer in self.layers:
            hidden = layer(hidden, context, places)
        return self.norm(hidden).unflatten(1, (-1, width + 1))[:, :, 1:]

    def _blocks(self, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First positions and numbers of masks of blocks, ``[batch, blocks]`` each."""
        batch, length = windows.shape
        # A block needs one position before it, and its drafts ahead.
        room = length - BLOCK
        blocks = min(BLOCKS_OF_TEXT, room)
        shape, device = (batch, blocks), windows.device
        full = torch.full(shape, BLOCK - 1, device=device)
        if not self.training:
            spread = torch.linspace(1, room, blocks, device=device).long()
            return spread.expand(shape), full
        anchors = 1 + torch.rand(batch, room, device=device).argsort(-1)[:, :blocks]
        short = torch.randint(1, BLOCK - 1, shape, device=device)
        return anchors, torch.where(torch.rand(shape, device=device) < FULL_BLOCKS, full, short)


class Places:
    """Where the queries of blocks are, and what they may attend to.

    Attributes:
        context: Positions of the text, ``[length]``.
        queries: Positions of the queries, ``[batch, 1, blocks × (width + 1)]``.
        later: Text that a query may not see, ``[batch, 1, queries, length]``.
        absent: Queries of its block that it may not, ``[batch, 1, blocks, 1, width + 1]``.
    """

    def __init__(
        self, anchors: torch.Tensor, counts: torch.Tensor, width: int, length: int
    ) -> None:
        offsets = torch.arange(width + 1, device=anchors.device)
        self.width = width
        self.context = torch.arange(length, device=anchors.device)
        self.queries = (anchors[..., None] + offsets).flatten(1)[:, None]
        firsts = anchors.repeat_interleave(width + 1, dim=1)
        self.later = (self.context >= firsts[..., None])[:, None]
        self.absent = (offsets > counts[..., None])[:, None, :, None]


class DFlashLayer(nn.Module):
    """A Qwen3 layer for the queries of blocks."""

    def __init__(self, target: LlamaConfig, mlp: int) -> None:
        super().__init__()
        hidden, epsilon = target.hidden_size, target.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.self_attn = DFlashAttention(target)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.mlp = GatedMLP(hidden, mlp)

    def forward(self, hidden: torch.Tensor, context: torch.Tensor, places: Places) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, places)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashAttention(nn.Module):
    """Attention of blocks to the text before them and to themselves, in every direction."""

    def __init__(self, target: LlamaConfig) -> None:
        super().__init__()
        hidden, (width, size) = target.hidden_size, attention_sizes(target)
        self.size, self.theta = size, target.rope_parameters["rope_theta"]
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, Linear(hidden, width))
        self.o_proj = Linear(width, hidden)
        self.q_norm = nn.RMSNorm(size, eps=target.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=target.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, context: torch.Tensor, places: Places) -> torch.Tensor:
        """Attention's output for the queries.

        Args:
            hidden: The queries, ``[batch, blocks × (width + 1), hidden]``.
            context: The text, ``[batch, length, hidden]``.
            places: Of both.
        """
        split = (-1, places.width + 1)
        query = self._turned(self.q_proj(hidden), self.q_norm, places.queries) * self.size**-0.5
        key, value = self._keys_and_values(hidden, places.queries)
        own_key, own_value = (heads.unflatten(2, split) for heads in (key, value))
        text_key, text_value = self._keys_and_values(context, places.context)
        text = (query @ text_key.transpose(-1, -2)).float()
        own = (query.unflatten(2, split) @ own_key.transpose(-1, -2)).float()
        scores = (
            text.masked_fill(places.later, -torch.inf),
            own.masked_fill(places.absent, -torch.inf).flatten(2, 3),
        )
        weights = torch.cat(scores, -1).softmax(-1).to(value.dtype)
        of_text, of_own = weights.split((text.shape[-1], places.width + 1), -1)
        attended = of_text @ text_value
        attended = attended + (of_own.unflatten(2, split) @ own_value).flatten(2, 3)
        return self.o_proj(join_heads(attended))

    def _keys_and_values(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shape ``[batch, heads, tokens, size]`` each."""
        key = self._turned(self.k_proj(hidden), self.k_norm, positions)
        return key, split_heads(self.v_proj(hidden), self.size)

    def _turned(
        self, projected: torch.Tensor, norm: nn.RMSNorm, positions: torch.Tensor
    ) -> torch.Tensor:
        """Heads, normed and turned, in the projection's type."""
        heads = norm(split_heads(projected, self.size).float())
        return rotate(heads, positions, self.theta).to(projected.dtype)


def _rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of ``[batch, length, size]`` those numbered ``[batch, count]``."""
    return tensor.gather(1, rows[..., None].expand(-1, -1, tensor.shape[-1]))
