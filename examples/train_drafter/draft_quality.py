"""How often the target accepts a drafter's tokens, on held-out answers, by kind of prompt."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from answers import IGNORED, Texts, split
from draft_data import read_recipe, read_shards
from draft_tokens import load_tokenizer, matching, whole_vocabulary
from errors import PairError
from heads import head_words, is_head, load_head
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

CHAIN = 4  # drafts in a step
ALL = "all"


@dataclass(frozen=True)
class DraftQuality:
    """On the answers to one kind of prompt.

    Attributes:
        greedy: Share of them that is the drafter's likeliest token: acceptance of the first child.
        tokens_per_step: Of greedy chains of four drafts, the target's own token included.
        sampled: Mean Σ min(P, Q) there, over the target's 16 likeliest tokens: acceptance of one
            draft that is drawn from Q. What lies beyond the 16 is left out.
    """

    greedy_tokens: int
    greedy: float
    tokens_per_step: float
    sampled_tokens: int
    sampled: float


class Drafter(Protocol):
    """What is measured; ``words`` tells its tokens."""

    words: Any

    def draft(self, tokens: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What it says at every token of an answer.

        Args:
            tokens: The text with the target's numbers, ``[length]``.
            prompt: Tokens of the prompt, at least 2.

        Returns:
            Which of the ``CHAIN`` drafts from this token on are the text's, ``[answer, CHAIN]``,
            the last ones cut off where the text ends. Its logits for the token,
            ``[answer, vocabulary]``.
        """


class DraftModel:
    """A draft model, which reads the text itself."""

    def __init__(self, folder: Path, target: Path, device: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.to(device).eval()
        rows = AutoConfig.from_pretrained(target).vocab_size
        self.words = whole_vocabulary(rows)
        if model.config.vocab_size != rows:
            tokenizers = load_tokenizer(target), load_tokenizer(folder)
            self.words = matching(*tokenizers, rows, model.config.vocab_size)

    def draft(self, tokens: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A draft that was accepted is the text's own token: the next one follows the text."""
        read, drawn = (torch.from_numpy(one)[tokens] for one in (self.words.read, self.words.drawn))
        logits = self._model(read[None].to(self._model.device), use_cache=False).logits[0].cpu()
        logits = logits[prompt - 1 : -1]
        hits = logits.argmax(-1) == drawn[prompt:]
        padded = torch.cat((hits, hits.new_zeros(CHAIN - 1)))
        return padded.unfold(0, CHAIN, 1), logits


class HeadOnTarget:
    """A head, which reads the target's hidden states."""

    def __init__(self, folder: Path, target: Path, device: str) -> None:
        self._head, self._target = load_head(folder, target, device)
        self._device = device
        self.words = head_words(self._head)

    def draft(self, tokens: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its chain continues from its own states, beginning before the answer's first token."""
        drafts, logits = self._head.draft(self._target, tokens.to(self._device), CHAIN)
        padded = torch.cat((tokens[prompt:], tokens.new_full((CHAIN - 1,), IGNORED)))
        answer = slice(prompt - 2, -1)  # the last row drafts what follows the text
        return drafts[answer].cpu() == padded.unfold(0, CHAIN, 1), logits[answer].cpu()


@torch.no_grad()
def measure_draft(
    folder: Path, data: Path, device: str, on_text: Callable[[], None]
) -> dict[str, DraftQuality]:
    """Quality by kind of prompt, and of all kinds together."""
    target = Path(read_recipe(data).target)
    drafter: Drafter = (HeadOnTarget if is_head(folder) else DraftModel)(folder, target, device)
    right: dict[str, list[torch.Tensor]] = defaultdict(list)
    overlaps: dict[str, list[torch.Tensor]] = defaultdict(list)
    for shard in read_shards(data, "validation"):
        texts = Texts([shard], drafter.words, 1 << 30)
        ends = shard.ends.tolist()
        for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            tokens = torch.from_numpy(shard.tokens[begin:end].astype(np.int64))
            prompt = int(shard.prompt_lengths[number])
            kinds = (str(shard.kinds[number]), ALL)
            temperature = shard.temperatures[number]
            if prompt < 2 or temperature not in (0, 1):
                on_text()
                continue
            found, logits = drafter.draft(tokens, prompt)
            for kind in kinds:
                if temperature == 0:
                    right[kind].append(found)
                else:
                    overlaps[kind].append(_overlap(logits, texts.batch([number]), prompt))
            on_text()
    if not right[ALL] or not overlaps[ALL]:
        raise PairError(
            f"{data} has too few answers for validation: give draft-data at least 24 prompts, so "
            "that three are held out"
        )
    return {name: _quality(right[name], overlaps[name]) for name in sorted(right)}


def _overlap(logits: torch.Tensor, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """Σ min(P, Q) at each token of an answer."""
    _, likely, shares = split(text[:, prompt - 1 : -1])
    q = logits.float().softmax(-1).gather(1, likely[0].clamp(min=0))
    return torch.where(likely[0] == IGNORED, 0.0, torch.minimum(shares[0], q)).sum(-1)


def _quality(right: list[torch.Tensor], overlaps: list[torch.Tensor]) -> DraftQuality:
    first = torch.cat([one[:, 0] for one in right]).double()
    sampled = torch.cat(overlaps).double() if overlaps else torch.zeros(0)
    steps = np.concatenate([_steps(one) for one in right])
    return DraftQuality(
        greedy_tokens=len(first),
        greedy=float(first.mean()),
        tokens_per_step=float(steps.mean()) if len(steps) else 1.0,
        sampled_tokens=len(sampled),
        sampled=float(sampled.mean()) if len(sampled) else 0.0,
    )


def _steps(right: torch.Tensor) -> NDArray[np.int64]:
    """Tokens of each step of an answer, the target's own token included.

    Each step follows where the one before ended. Steps that the text's end cuts off are left
    out.
    """
    lengths = right.long().cumprod(-1).sum(-1)[: max(0, len(right) - CHAIN + 1)].tolist()
    start, steps = 0, []
    while start < len(lengths):
        steps.append(lengths[start] + 1)
        start += lengths[start] + 1
    return np.array(steps, dtype=np.int64)


def as_data(quality: dict[str, DraftQuality]) -> dict[str, Any]:
    """For a JSON file."""
    return {kind: asdict(one) for kind, one in quality.items()}
