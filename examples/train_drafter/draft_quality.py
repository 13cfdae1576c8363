"""How often the target accepts a draft model's tokens, on held-out answers, by kind of prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distil import IGNORED, Texts
from draft_data import read_recipe, read_shards
from draft_tokens import load_tokenizer, matching, whole_vocabulary
from errors import PairError
from head_quality import walk
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

CHAIN = 4  # drafts in a step
ALL = "all"


@dataclass(frozen=True)
class DraftQuality:
    """On the answers to one kind of prompt.

    Attributes:
        greedy_tokens: Tokens of greedy answers.
        greedy: Share of them that is the draft's likeliest token: acceptance of the first child.
        tokens_per_step: Of greedy chains of four drafts, the target's own token included.
        sampled_tokens: Tokens of answers at temperature 1.
        sampled: Mean Σ min(P, Q) there, over the target's 16 likeliest tokens: acceptance of one
            draft that is drawn from Q. What lies beyond the 16 is left out.
    """

    greedy_tokens: int
    greedy: float
    tokens_per_step: float
    sampled_tokens: int
    sampled: float


@torch.no_grad()
def measure_draft(
    draft: Path, data: Path, device: str, on_text: Callable[[], None]
) -> dict[str, DraftQuality]:
    """Quality by kind of prompt, and of all kinds together.

    Args:
        draft: The draft's folder.
        data: Folder that draft-data wrote; its validation part is read.
        device: Where the draft runs.
        on_text: Called after each answer.

    Raises:
        PairError: If there is no data, or the draft's tokens are not the target's.
    """
    target = Path(read_recipe(data).target)
    rows = AutoConfig.from_pretrained(target).vocab_size
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).to(device).eval()
    words = whole_vocabulary(rows)
    if model.config.vocab_size != rows:
        tokenizers = load_tokenizer(target), load_tokenizer(draft)
        words = matching(*tokenizers, rows, model.config.vocab_size)
    hits: dict[str, list[NDArray[np.bool_]]] = defaultdict(list)
    overlaps: dict[str, list[NDArray[np.float32]]] = defaultdict(list)
    for shard in read_shards(data, "validation"):
        texts = Texts([shard], words, 1 << 30)
        starts = np.concatenate(([0], shard.ends[:-1]))
        for number, kind in enumerate(shard.kinds.tolist()):
            prompt = int(shard.prompt_lengths[number])
            answer = shard.tokens[starts[number] + prompt : shard.ends[number]]
            if shard.temperatures[number] == 0:
                wanted = torch.from_numpy(words.drawn[answer.astype(np.int64)])
                found = _hits(model, texts.batch([number]), prompt, wanted)
                for name in (kind, ALL):
                    hits[name].append(found)
            elif shard.temperatures[number] == 1:
                found_overlap = _overlap(model, texts.batch([number]), prompt)
                for name in (kind, ALL):
                    overlaps[name].append(found_overlap)
            on_text()
    if not hits[ALL] or not overlaps[ALL]:
        raise PairError(
            f"{data} has too few answers for validation: give draft-data at least 24 prompts, so "
            "that three are held out"
        )
    return {name: _quality(hits[name], overlaps[name]) for name in sorted(hits)}


def _logits(model: LlamaForCausalLM, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """The draft's logits for each token of an answer, ``[answer, draft's vocabulary]``."""
    tokens = text[..., 0].long().to(model.device)
    return model(tokens, use_cache=False).logits[0, prompt - 1 : -1].float().cpu()


def _hits(
    model: LlamaForCausalLM, text: torch.Tensor, prompt: int, wanted: torch.Tensor
) -> NDArray[np.bool_]:
    """Whether the draft's likeliest token is the answer's next one."""
    return (_logits(model, text, prompt).argmax(-1) == wanted).numpy()


def _overlap(model: LlamaForCausalLM, text: torch.Tensor, prompt: int) -> NDArray[np.float32]:
    """Σ min(P, Q) at each token of an answer."""
    count = (text.shape[2] - 1) // 2
    likely = text[0, prompt - 1 : -1, 1 : 1 + count].long()
    shares = text[0, prompt - 1 : -1, 1 + count :]
    q = _logits(model, text, prompt).softmax(-1).gather(1, likely.clamp(min=0))
    both = torch.where(likely == IGNORED, 0.0, torch.minimum(shares, q))
    return both.sum(-1).numpy()


def _quality(hits: list[NDArray[np.bool_]], overlaps: list[NDArray[np.float32]]) -> DraftQuality:
    right = np.concatenate(hits)
    sampled = np.concatenate(overlaps) if overlaps else np.zeros(0, dtype=np.float32)
    steps = np.concatenate([_steps(one) for one in hits])
    return DraftQuality(
        greedy_tokens=len(right),
        greedy=float(right.mean()),
        tokens_per_step=float(steps.mean()) if len(steps) else 1.0,
        sampled_tokens=len(sampled),
        sampled=float(sampled.mean()) if len(sampled) else 0.0,
    )


def _steps(hits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens of each step of a greedy chain.

    A draft that was accepted is the text's own token: the chain's next draft is what the
    draft says of the text.
    """
    if len(hits) < CHAIN:
        return np.zeros(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(hits, CHAIN)
    return walk(np.cumprod(windows, axis=1).sum(axis=1), prompt_length=1)


def as_data(quality: dict[str, DraftQuality]) -> dict[str, Any]:
    """For a JSON file."""
    return {kind: asdict(one) for kind, one in quality.items()}
