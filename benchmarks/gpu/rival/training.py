"""Trains a head for so many seconds."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from heads import HeadRecipe, train_head
from training import Listener, Schedule

_TIMED_STEPS = 12
_VALIDATIONS = 5


def _listener() -> Listener:
    """Prints stages alone."""
    return Listener(
        lambda name, total: print(f"training: {name}, {total} steps", flush=True), lambda loss: None
    )


def train_for(seconds: float, data: Path, out: Path, tokens: int, batch: int) -> dict[str, Any]:
    """Trains an EAGLE-3 head; as many steps as fit into the time, by the time of some steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    schedule = Schedule(_TIMED_STEPS, 50, batch, _TIMED_STEPS, 0)
    recipe = HeadRecipe("eagle3", 0, tokens, 320, 1e-3, False, schedule, device)
    trial = out.with_name(f"{out.name}-trial")
    train_head(replace(recipe, schedule=replace(schedule, steps=3)), data, trial, _listener())
    begun = time.monotonic()
    record = train_head(recipe, data, out.with_name(f"{out.name}-timed"), _listener())
    # The record's hours are those of training and of one validation, without reading.
    each = 3600 * record["hours"] / _TIMED_STEPS
    left = seconds - (time.monotonic() - begun)
    steps = max(_TIMED_STEPS, int(left / each))
    print(f"training: {1e3 * each:.0f} ms a step, {steps} steps", flush=True)
    schedule = Schedule(steps, 50, batch, -(-steps // _VALIDATIONS), 0)
    return train_head(replace(recipe, schedule=schedule), data, out, _listener())
