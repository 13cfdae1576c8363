"""The training loop: AdamW, warm-up, cosine decay, bfloat16 autocast, checkpoints."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from errors import PairError
from torch import nn

FINAL_RATE = 0.05  # of the peak learning rate
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
VALIDATION_WINDOWS = 128
CHECKPOINT = "resume.pt"  # in the folder of what is trained


@dataclass(frozen=True)
class Listener:
    """Told what is going on: a new stage and its steps (None: unknown), and each step's loss.

    Steps that learn nothing have no loss.
    """

    on_stage: Callable[[str, int | None], None]
    on_step: Callable[[float | None], None]


class Batches(ABC):
    """What is learnt from: `answers.Texts`."""

    @abstractmethod
    def __len__(self) -> int:
        """Sequences in all."""

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> torch.Tensor:
        """The sequences with these numbers."""

    @abstractmethod
    def shuffled_batches(self, size: int, seed: int) -> Iterator[torch.Tensor]:
        """Batches without end, every pass over the sequences in a new order."""

    def evenly_spaced_batches(self, size: int, at_most: int) -> Iterator[torch.Tensor]:
        """Each of ``at_most`` sequences once, spread over all."""
        count = min(at_most, len(self))
        indices = np.linspace(0, len(self) - 1, count).astype(int).tolist()
        for first in range(0, count, size):
            yield self.batch(indices[first : first + size])


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a model learns.

    Attributes:
        warmup: Steps of linear warm-up; at most a tenth of the steps are used.
        seed: Decides the order of the sequences.
    """

    steps: int
    warmup: int
    batch_size: int
    validate_every: int
    seed: int

    def over(self, windows: Batches) -> Schedule:
        """With its number of steps settled: as given, or one pass over the windows."""
        one_pass = max(1, len(windows) // self.batch_size)
        return replace(self, steps=self.steps or one_pass)

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 0) as a fraction of its peak."""
        warmup = min(self.warmup, self.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - 1 - warmup)
        return FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class ValidationPoint:
    """Mean cross-entropy over the validation windows, nats per token."""

    step: int
    loss: float
    hours: float = 0.0


def train(
    model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], training: Batches,
    validation: Batches, schedule: Schedule, *, peak_learning_rate: float, muon: bool = False,
    on_step: Callable[[float | None], None],
    on_validation: Callable[[ValidationPoint], None] | None = None, checkpoint: Path | None = None,
) -> list[ValidationPoint]:  # fmt: skip
    """Trains the model in place, where it is.

    Args:
        loss_of: The model's mean loss over windows of shape ``[batch, length + 1]``.
        muon: Whether matrices learn by Muon. For models without embeddings.
        on_step: Given each step's loss; None: a step of an earlier run.
        on_validation: Given each validation loss when it is known.
        checkpoint: Written at each validation; a run that finds it goes on from there.
    """
    optimizers = _optimizers(model, peak_learning_rate, muon)
    batches = training.shuffled_batches(schedule.batch_size, schedule.seed)
    points: list[ValidationPoint] = []
    if checkpoint is not None and checkpoint.is_file():
        points = _load_checkpoint(checkpoint, model, optimizers, schedule)
    first = points[-1].step if points else 0
    began = time.monotonic() - 3600 * (points[-1].hours if points else 0)
    for _ in range(first):
        next(batches)
        on_step(None)
    model.train()
    for step in range(first, schedule.steps):
        loss = loss_of(next(batches))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak_learning_rate * schedule.rate(step)
            optimizer.step()
        on_step(loss.item())
        done = step + 1
        if done % schedule.validate_every == 0 or done == schedule.steps:
            model.eval()
            loss_now = _validation_loss(loss_of, validation, schedule.batch_size)
            model.train()
            hours = (time.monotonic() - began) / 3600
            points.append(ValidationPoint(done, loss_now, round(hours, 4)))
            if checkpoint is not None:
                _save_checkpoint(checkpoint, model, optimizers, schedule, points)
            if on_validation is not None:
                on_validation(points[-1])
    return points


def _optimizers(
    model: nn.Module, learning_rate: float, muon: bool
) -> tuple[torch.optim.Optimizer, ...]:
    """AdamW that decays matrices (the embedding included) and leaves norms alone, or Muon."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim >= 2]
    norms = [p for p in parameters if p.ndim < 2]
    no_decay = {"params": norms, "weight_decay": 0.0}
    if not muon:
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, no_decay]
        return (torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS),)
    return (
        torch.optim.AdamW([no_decay], lr=learning_rate, betas=BETAS),
        # Steps as long as AdamW's, so that its learning rates serve.
        torch.optim.Muon(
            matrices, lr=learning_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
    )


def _save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    schedule: Schedule,
    points: list[ValidationPoint],
) -> None:
    """All that a later run needs; whole or not at all."""
    state = {
        "model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers],
        "schedule": asdict(schedule), "points": [asdict(point) for point in points],
    }  # fmt: skip
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _load_checkpoint(
    path: Path, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], schedule: Schedule
) -> list[ValidationPoint]:
    """Fills model and optimizers; returns the validation losses until then."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    if state["schedule"] != asdict(schedule):
        raise PairError(
            f"{path} is of another schedule, {state['schedule']}: give its options again, or "
            "choose another folder"
        )
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise PairError(f"{path} is of a model of another shape: {error}") from error
    for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    return [ValidationPoint(**point) for point in state["points"]]


@torch.no_grad()
def _validation_loss(
    loss_of: Callable[[torch.Tensor], torch.Tensor], validation: Batches, batch_size: int
) -> float:
    total, count = 0.0, 0
    for windows in validation.evenly_spaced_batches(batch_size, VALIDATION_WINDOWS):
        total += loss_of(windows).item() * len(windows)
        count += len(windows)
    return total / count
