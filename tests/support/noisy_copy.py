"""A draft for any target: a copy with noise in its weights.

It drafts well without training: noise decides how well. It costs as much as the target, so it
shows whether outputs are right, and never what a draft gains.
"""

from pathlib import Path

import torch


def write_noisy_copy(model: str | Path, folder: Path, noise: float, seed: int = 0) -> Path:
    """Writes a model whose matrices got normal noise, relative to their standard deviations."""
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
