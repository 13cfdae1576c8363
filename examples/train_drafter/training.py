"""The loop that trains a draft model or a head, and the recipe that both share."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from answers import Texts
from torch import nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from sequoia_vllm.cli.common import Report

FINAL_RATE = 0.05  # of the highest learning rate
WEIGHT_DECAY = 0.1  # of matrices, the embedding included
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
VALIDATION_TEXTS = 128


@dataclass(frozen=True)
class Recipe:
    """Everything but the data and a drafter's sizes that decides what it becomes."""

    tokens: int  # that can be drafted, the target's most frequent; 0: all of the target's
    sequence_length: int  # tokens of a text that are read; the rest is left out
    learning_rate: float  # the highest
    steps: int  # of the optimizer; 0 is one pass over the texts
    warmup: int  # steps of linear warm-up; at most a tenth of the steps are used
    batch_size: int
    validate_every: int
    seed: int  # decides weights and order
    device: str


def train(
    model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], texts: dict[str, Texts],
    recipe: Recipe, report: Report,
) -> dict[str, Any]:  # fmt: skip
    """Trains the model in place, by its mean loss over a batch of `Texts`, nats per token; returns
    the recipe with its number of steps, parameters, texts, hours, and losses on held-out texts."""
    steps = recipe.steps or max(1, len(texts["training"]) // recipe.batch_size)
    norms = [one for one in model.parameters() if one.ndim < 2]
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    groups = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    rate = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, min(recipe.warmup, steps // 10), steps, min_lr_rate=FINAL_RATE
    )
    batches = texts["training"].shuffled_batches(recipe.batch_size, recipe.seed)
    began, losses = time.monotonic(), []
    model.train()
    for step in range(1, steps + 1):
        loss = loss_of(next(batches))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        rate.step()
        report(f"loss {loss.item():.3f}", step, steps)
        if step % recipe.validate_every == 0 or step == steps:
            model.eval()
            found = _validation_loss(loss_of, texts["validation"], recipe.batch_size)
            model.train()
            losses.append({"step": step, "loss": found})
    return {
        "recipe": asdict(replace(recipe, steps=steps)),
        "parameters": sum(one.numel() for one in model.parameters()),
        "texts": {part: len(found) for part, found in texts.items()},
        "hours": round((time.monotonic() - began) / 3600, 4),
        "validation_loss": losses,
    }


@torch.no_grad()
def _validation_loss(
    loss_of: Callable[[torch.Tensor], torch.Tensor], texts: Texts, batch_size: int
) -> float:
    """Mean over at most 128 texts, spread over all of them."""
    count = min(VALIDATION_TEXTS, len(texts))
    chosen = np.linspace(0, len(texts) - 1, count).astype(int).tolist()
    total = 0.0
    for first in range(0, count, batch_size):
        batch = texts.batch(chosen[first : first + batch_size])
        total += loss_of(batch).item() * len(batch)
    return total / count
