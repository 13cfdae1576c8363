"""Trains a head for so many seconds."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from heads import train_head
from training import Recipe

_TIMED_STEPS = 12
_VALIDATIONS = 5


def train_for(seconds: float, data: Path, out: Path, tokens: int, batch: int) -> dict[str, Any]:
    """Trains an EAGLE-3 head; as many steps as fit into the time, by the time of some steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    recipe = Recipe(tokens, 320, 1e-3, _TIMED_STEPS, 50, batch, _TIMED_STEPS, 0, device)

    def run(recipe: Recipe, out: Path) -> dict[str, Any]:
        print(f"training: {recipe.steps} steps", flush=True)
        return train_head(0, recipe, data, out, lambda what, done, total: None)

    run(replace(recipe, steps=3), out.with_name(f"{out.name}-trial"))
    begun = time.monotonic()
    record = run(recipe, out.with_name(f"{out.name}-timed"))
    # The record's hours are those of training and of one validation, without reading.
    each = 3600 * record["hours"] / _TIMED_STEPS
    left = seconds - (time.monotonic() - begun)
    steps = max(_TIMED_STEPS, int(left / each))
    print(f"training: {1e3 * each:.0f} ms a step, {steps} steps", flush=True)
    return run(replace(recipe, steps=steps, validate_every=-(-steps // _VALIDATIONS)), out)
