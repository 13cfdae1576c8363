"""The embedded pair as plain functions, for `sequoia_vllm.reference_step`."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from sequoia_vllm.reference_step import Model, begin, read, step
from sequoia_vllm.tree import TokenTree

MODELS = Path(__file__).parents[2] / "examples" / "models"
EMBEDDED_PARENTS = (-1, 0, 1, 0, 2, 1, 3, 4)


@cache
def embedded_model(name: str) -> Model:
    """``examples/models/NAME`` in float32, by transformers."""
    loaded = AutoModelForCausalLM.from_pretrained(
        MODELS / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    @torch.inference_mode()
    def model(tokens, positions, sees, cached):
        past = DynamicCache()
        for layer in range(len(cached) // 2):
            past.update(cached[2 * layer], cached[2 * layer + 1], layer)
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        logits = loaded(
            tokens[None], position_ids=positions[None], attention_mask=mask[None, None],
            past_key_values=past, use_cache=True,
        ).logits[0]  # fmt: skip
        return logits, [part for layer in past.layers for part in (layer.keys, layer.values)]

    return model


def accepted_by_depth(prompts: list[list[int]], parents: Sequence[int], trees: int) -> list[int]:
    """Greedy trees of the embedded pair, by how many of their nodes were accepted.

    Args:
        trees: How many trees there are for each request.
    """
    rng = torch.Generator()
    target, draft = embedded_model("target"), embedded_model("draft")
    counts = [0] * (TokenTree(tuple(parents)).depth + 1)
    for prompt in prompts:
        request = begin(target, prompt, 0.0, rng)
        for _ in range(trees):
            counts[step(target, draft, request, parents, 0.0, rng)] += 1
    return counts


def greedy_tokens(model: Model, prompt: list[int], count: int) -> list[int]:
    """The prompt and so many tokens of plain greedy decoding."""
    tokens, cached = list(prompt), []
    for _ in range(count):
        logits, cached = read(model, tokens, cached)
        tokens.append(int(logits[-1].argmax()))
    return tokens
