"""From the target's answers to a small Llama that drafts for it, as vLLM loads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_data import Shard, read_recipe, read_shards
from draft_tokens import load_tokenizer, matching, reduced_tokenizer, whole_vocabulary
from numpy.typing import NDArray
from pair import Listener
from shapes import Shape
from training import Schedule, train
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from sequoia_vllm.vocabulary import Matching

CHECKPOINT = "resume.pt"
IGNORED = -1
_SMALLEST_REST = 1e-4  # keeps the logarithm of what is left to other tokens finite


@dataclass(frozen=True)
class DraftRecipe:
    """Everything but the data that decides what a draft becomes.

    Attributes:
        shape: Its sizes.
        tokens: Tokens of its vocabulary, the target's most frequent; 0: all of the target's.
        sequence_length: Tokens of a text that are read; the rest is left out.
        peak_learning_rate: The highest.
        schedule: ``steps`` 0 is one pass over the texts.
        device: Where it is trained.
    """

    shape: Shape
    tokens: int
    sequence_length: int
    peak_learning_rate: float
    schedule: Schedule
    device: str


class Texts:
    """Answers in the draft's tokens, padded, with the target's distribution of each token.

    A batch is ``[texts, length, 1 + 2 × 16]`` in float32: the token that the draft reads, the
    draft's numbers of the target's likeliest next tokens (-1: none, or no draft has it), and
    their probabilities. Positions whose next token is no answer's have no likely token at all.
    """

    def __init__(self, shards: Sequence[Shard], words: Matching, length: int) -> None:
        self._rows = [row for shard in shards for row in _rows(shard, words, length)]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> torch.Tensor:
        """The texts with these numbers."""
        rows = [self._rows[index] for index in indices]
        out = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), dtype=np.float32)
        count = (out.shape[2] - 1) // 2
        out[..., 1 : 1 + count] = IGNORED
        for place, row in enumerate(rows):
            out[place, : len(row)] = row
        return torch.from_numpy(out)

    def shuffled_batches(self, size: int, seed: int) -> Iterator[torch.Tensor]:
        """Batches without end, every pass over the texts in a new order."""
        rng = np.random.default_rng(seed)
        order: list[int] = []
        while True:
            while len(order) < size:
                order += rng.permutation(len(self)).tolist()
            yield self.batch(order[:size])
            del order[:size]

    def evenly_spaced_batches(self, size: int, at_most: int) -> Iterator[torch.Tensor]:
        """Each of ``at_most`` texts once, spread over all."""
        count = min(at_most, len(self))
        indices = np.linspace(0, len(self) - 1, count).astype(int).tolist()
        for first in range(0, count, size):
            yield self.batch(indices[first : first + size])


def _rows(shard: Shard, words: Matching, length: int) -> Iterator[NDArray[np.float32]]:
    """The texts of a shard, as `Texts` has them."""
    begin = answered = 0
    count = shard.likely.shape[1]
    for end, prompt in zip(shard.ends.tolist(), shard.prompt_lengths.tolist(), strict=True):
        tokens, total = shard.tokens[begin:end], end - begin - prompt
        likely = words.drawn[shard.likely[answered : answered + total]]
        shares = np.exp(shard.log_probabilities[answered : answered + total].astype(np.float32))
        row = np.zeros((len(tokens), 1 + 2 * count), dtype=np.float32)
        row[:, 0] = words.read[tokens]
        row[:, 1 : 1 + count] = IGNORED
        row[prompt - 1 : -1, 1 : 1 + count] = likely
        row[prompt - 1 : -1, 1 + count :] = shares
        yield row[:length]
        begin, answered = end, answered + total


def distillation_loss(model: LlamaForCausalLM, texts: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the target's distribution, nats per token of an answer.

    The target's likeliest tokens are known with their probabilities, all others together as
    the rest. A likely token that the draft does not have counts nothing.

    Args:
        model: The draft.
        texts: A batch of `Texts`.
    """
    texts = texts.to(model.device)
    count = (texts.shape[2] - 1) // 2
    likely, shares = texts[..., 1 : 1 + count].long(), texts[..., 1 + count :]
    answered = shares.sum(-1) > 0
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.model(texts[..., 0].long(), use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[answered])
    log_q = logits.float().log_softmax(-1)
    likely, shares = likely[answered], shares[answered]
    known = likely != IGNORED
    of_likely = log_q.gather(1, likely.clamp(min=0))
    loss = -torch.where(known, shares * of_likely, 0.0).sum(-1)
    rest = (1 - shares.sum(-1)).clamp(min=0)
    left = (1 - torch.where(known, of_likely.exp(), 0.0).sum(-1)).clamp(min=_SMALLEST_REST)
    return (loss - rest * left.log()).sum() / max(1, len(loss))


def train_draft(recipe: DraftRecipe, data: Path, out: Path, listener: Listener) -> dict[str, Any]:
    """Writes the draft to ``out``; returns the record.

    A run that was stopped goes on from its last validation.

    Args:
        recipe: Sizes and schedule.
        data: Folder that draft-data wrote.
        out: Folder for the draft.
        listener: Told of every step.

    Raises:
        PairError: If there is no data, or the target's vocabulary cannot be reduced.
    """
    target = Path(read_recipe(data).target)
    shards = {part: read_shards(data, part) for part in ("training", "validation")}
    config = AutoConfig.from_pretrained(target)
    tokenizer, words = draft_vocabulary(
        target, config.vocab_size, shards["training"], recipe.tokens
    )
    texts = {part: Texts(found, words, recipe.sequence_length) for part, found in shards.items()}
    schedule = recipe.schedule.over(texts["training"])
    recipe = replace(recipe, schedule=schedule)
    size = len(tokenizer) if recipe.tokens else config.vocab_size
    model = new_draft(recipe, config, size, tokenizer).to(recipe.device)
    out.mkdir(parents=True, exist_ok=True)
    listener.on_stage("draft", schedule.steps)
    points = train(
        model,
        lambda batch: distillation_loss(model, batch),
        texts["training"],
        texts["validation"],
        schedule,
        peak_learning_rate=recipe.peak_learning_rate,
        on_step=listener.on_step,
        checkpoint=out / CHECKPOINT,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "target": str(target),
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "vocabulary": size,
        "texts": {part: len(found) for part, found in texts.items()},
        "hours": points[-1].hours,
        "validation_loss": [asdict(point) for point in points],
    }


def draft_vocabulary(
    target: Path, rows: int, shards: Sequence[Shard], tokens: int
) -> tuple[Any, Matching]:
    """The draft's tokenizer, and how its tokens belong to the target's.

    Args:
        target: The target's folder.
        rows: Of the target's logits.
        shards: What tokens are counted in.
        tokens: Tokens to keep; 0: all.
    """
    tokenizer = load_tokenizer(target)
    if not tokens or tokens >= len(tokenizer):
        return tokenizer, whole_vocabulary(rows)
    counts = sum(np.bincount(shard.tokens, minlength=rows) for shard in shards)
    reduced = reduced_tokenizer(tokenizer, np.asarray(counts), tokens)
    return reduced, matching(tokenizer, reduced, rows, len(reduced))


def new_draft(recipe: DraftRecipe, target: Any, rows: int, tokenizer: Any) -> LlamaForCausalLM:
    """A randomly initialised draft that reads texts as long as the target does."""
    shape = recipe.shape
    torch.manual_seed(recipe.schedule.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=rows,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.mlp,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
