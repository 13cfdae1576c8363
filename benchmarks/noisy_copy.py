"""``python -m benchmarks.noisy_copy MODEL FOLDER``: a copy with noise in its weights, as a draft.

A copy of a target drafts well without training: noise decides how well. It costs as much as
the target, so that it shows whether outputs are right and never what a draft gains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def write_noisy_copy(model: str | Path, folder: Path, noise: float, seed: int = 0) -> Path:
    """Adds normal noise to every matrix of a model.

    Args:
        model: A folder, or a name on the Hub.
        folder: Where the copy and the model's tokenizer go.
        noise: Standard deviation of the noise, relative to that of each matrix's weights.
        seed: Decides the noise.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in copy.parameters():
            if weights.ndim == 2:
                weights += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    copy.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def main(
    model: Annotated[str, typer.Argument(help="Model, name or path.")],
    folder: Annotated[Path, typer.Argument(help="Where the copy goes.")],
    noise: Annotated[
        float, typer.Option(min=0, help="Relative to the standard deviation of each matrix.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Decides the noise.")] = 0,
) -> None:
    """Writes a copy of a model with noise in its weights."""
    write_noisy_copy(model, folder, noise, seed)


if __name__ == "__main__":
    typer.run(main)
