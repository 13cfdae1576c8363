"""How good a pair is on its prompts: the numbers of the model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from errors import PairError
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sequoia_vllm.prompts import Prompt, PromptError, numbered_prompts


@dataclass(frozen=True)
class Estimate:
    """A mean over positions, and its standard error with prompts as independent draws."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class PairQuality:
    """Teacher-forced measurements; every token of a prompt but its first is predicted.

    Attributes:
        prompts: Number of prompts.
        positions: Number of predicted tokens.
        target_parameters: Parameters of the target, tied embeddings counted once.
        draft_parameters: The same for the draft.
        target_cross_entropy: −log P(token), nats.
        draft_cross_entropy: −log Q(token), nats.
        top1_agreement: Whether P and Q have the same most likely token.
        overlap: 1 − TV(P, Q) = Σ min(P, Q) at temperature 1: the probability
            that speculative sampling keeps one token drawn from Q.
    """

    prompts: int
    positions: int
    target_parameters: int
    draft_parameters: int
    target_cross_entropy: Estimate
    draft_cross_entropy: Estimate
    top1_agreement: Estimate
    overlap: Estimate


def read_prompts(path: Path) -> list[str]:
    """One ``{"prompt": …}`` object per line.

    Raises:
        PairError: If the file is missing or a line is wrong; names it.
    """
    try:
        lines = numbered_prompts(path, Prompt)
    except PromptError as error:
        raise PairError(str(error)) from error
    for number, one in lines:
        if one.prompt is None:
            raise PairError(f'{path}, line {number}: a pair continues texts: give a "prompt"')
    return [one.prompt or "" for _, one in lines]


def write_prompts(path: Path, prompts: Sequence[str]) -> None:
    """What ``read_prompts`` reads."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), "utf-8")


def measure_pair(
    pair: Path, prompts: Sequence[str], device: str, on_prompt: Callable[[], None]
) -> PairQuality:
    """Runs ``pair/target`` and ``pair/draft`` over the prompts in float32.

    Raises:
        PairError: If a model is missing, the two tokenizers differ, or a prompt
            has fewer than two tokens.
    """
    tokenized = _tokenize(pair, prompts)
    target, draft = (_load(pair / name, device) for name in ("target", "draft"))
    rows = []
    for ids in tokenized:
        rows.append(_measure_prompt(target, draft, torch.tensor(ids, device=device)))
        on_prompt()
    columns = (estimate([row[metric] for row in rows]) for metric in range(4))
    return PairQuality(
        len(rows),
        sum(row.shape[1] for row in rows),
        target.num_parameters(),
        draft.num_parameters(),
        *columns,
    )


def _tokenize(pair: Path, prompts: Sequence[str]) -> list[list[int]]:
    folders = [pair / name for name in ("target", "draft")]
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise PairError(f"{folder} holds no model")
    target, draft = map(AutoTokenizer.from_pretrained, folders)
    if target.get_vocab() != draft.get_vocab():
        raise PairError(f"{pair}: target and draft have different tokenizers")
    tokenized = [target(prompt).input_ids for prompt in prompts]
    if not tokenized or min(map(len, tokenized)) < 2:
        raise PairError("every prompt needs at least two tokens, and there must be one prompt")
    return tokenized


def _load(folder: Path, device: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()


@torch.no_grad()
def _measure_prompt(
    target: PreTrainedModel, draft: PreTrainedModel, ids: torch.Tensor
) -> NDArray[np.float64]:
    """The four metrics at every predicted token, in PairQuality's order.

    Args:
        target: Its next-token distribution is P.
        draft: Its next-token distribution is Q.
        ids: One prompt, shape ``[tokens]``.

    Returns:
        Shape ``[4, tokens - 1]``.
    """
    log_p, log_q = (_log_probabilities(model, ids) for model in (target, draft))
    metrics = (
        functional.nll_loss(log_p, ids[1:], reduction="none"),
        functional.nll_loss(log_q, ids[1:], reduction="none"),
        log_p.argmax(-1) == log_q.argmax(-1),
        torch.minimum(log_p, log_q).exp().sum(-1),
    )
    return torch.stack([metric.double() for metric in metrics]).cpu().numpy()


def _log_probabilities(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The distribution of every token but the first, shape ``[tokens - 1, vocabulary]``."""
    return model(ids[None]).logits[0, :-1].log_softmax(-1)


def estimate(per_prompt: Sequence[NDArray[np.float64]]) -> Estimate:
    """The mean over all positions; its error is the ratio estimator's, clustered by prompt."""
    mean = np.concatenate(per_prompt).mean()
    positions = sum(map(len, per_prompt))
    deviations = np.array([(values - mean).sum() for values in per_prompt])
    clusters = len(deviations)
    correction = clusters / max(1, clusters - 1)
    error = np.sqrt(correction * (deviations**2).sum()) / positions
    return Estimate(float(mean), float(error))
