"""Whether a grown model computes what its source does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sequoia_vllm.enlarge.checkpoint import find_checkpoint
from sequoia_vllm.enlarge.mark import GrowError

if TYPE_CHECKING:
    import torch

# Share of the logits' standard deviation: sums over wider rows are added up in
# another order, which in float32 makes a thousandth of this.
TOLERANCE = 1e-3
_SEQUENCES, _LENGTH = 2, 32


@dataclass(frozen=True)
class Agreement:
    """Float32 logits of two models on the same random tokens.

    Attributes:
        difference: Largest difference of a logit.
        deviation: Standard deviation of the source's logits.
        positions: Positions compared.
    """

    difference: float
    deviation: float
    positions: int


def check_growth(source: str, folder: Path, dtype: str) -> Agreement:
    """Compares logits in float32, with the source's weights rounded as the grown model's are.

    Raises:
        GrowError: If they differ by more than floating point explains.
    """
    expected = _logits(find_checkpoint(source), dtype)
    found = _logits(folder, dtype)
    difference = float((expected - found).abs().max())
    agreement = Agreement(difference, float(expected.std()), expected.shape[0] * expected.shape[1])
    if not difference <= TOLERANCE * agreement.deviation:  # not <=: a NaN fails too
        raise GrowError(
            f"{folder} does not compute what {source} does: logits differ by {difference:.3g} "
            f"(their standard deviation is {agreement.deviation:.3g}); please report this"
        )
    return agreement


def _logits(folder: Path, dtype: str) -> torch.Tensor:
    """float32 ``[2, 32, vocabulary]``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).float()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (_SEQUENCES, _LENGTH), generator=generator)
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens).logits
    return logits
