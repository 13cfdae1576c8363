"""From the target's answers to a small Llama that drafts for it, as vLLM loads it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answers import IGNORED, Texts, cross_entropies, split, token_counts
from draft_data import Shard, read_recipe, read_shards
from draft_tokens import load_tokenizer, matching, reduced_tokenizer, whole_vocabulary
from numpy.typing import NDArray
from shapes import Shape
from training import CHECKPOINT, Listener, Schedule, train
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sequoia_vllm.vocabulary.matching import Matching

EMBEDDING_SIZE = 0.05  # root mean square of the numbers that embeddings begin with


@dataclass(frozen=True)
class DraftRecipe:
    """Everything but the data that decides what a draft becomes.

    Attributes:
        tokens: Tokens of its vocabulary, the target's most frequent; 0: all of the target's.
        sequence_length: Tokens of a text that are read; the rest is left out.
        schedule: ``steps`` 0 is one pass over the texts.
    """

    shape: Shape
    tokens: int
    sequence_length: int
    peak_learning_rate: float
    schedule: Schedule
    device: str


def distillation_loss(model: LlamaForCausalLM, texts: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the target's distribution, nats per token of an answer."""
    tokens, likely, shares = split(texts.to(model.device))
    answered = shares.sum(-1) > 0
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[answered])
    losses = cross_entropies(logits, likely[answered], shares[answered])
    return losses.sum() / max(1, len(losses))


def train_draft(recipe: DraftRecipe, data: Path, out: Path, listener: Listener) -> dict[str, Any]:
    """Writes the draft to ``out``; returns the record.

    A run that was stopped goes on from its last validation.
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
    model = new_draft(recipe, config, size, tokenizer)
    embed_like(model, target, words, token_counts(shards["training"], config.vocab_size))
    model.to(recipe.device)
    out.mkdir(parents=True, exist_ok=True)
    listener.on_stage("draft", schedule.steps)
    points = train(
        model, lambda batch: distillation_loss(model, batch), texts["training"],
        texts["validation"], schedule, peak_learning_rate=recipe.peak_learning_rate,
        on_step=listener.on_step, checkpoint=out / CHECKPOINT,
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "target": str(target), "recipe": asdict(recipe), "parameters": model.num_parameters(),
        "vocabulary": size, "texts": {part: len(found) for part, found in texts.items()},
        "hours": points[-1].hours, "validation_loss": [asdict(point) for point in points],
    }  # fmt: skip


def draft_vocabulary(
    target: Path, rows: int, shards: Sequence[Shard], tokens: int
) -> tuple[Any, Matching]:
    """The draft's tokenizer, and how its tokens belong to the target's.

    Args:
        rows: Of the target's logits.
        shards: What tokens are counted in.
        tokens: Tokens to keep; 0: all.
    """
    tokenizer = load_tokenizer(target)
    if not tokens or tokens >= len(tokenizer):
        return tokenizer, whole_vocabulary(rows)
    reduced = reduced_tokenizer(tokenizer, token_counts(shards, rows), tokens)
    return reduced, matching(tokenizer, reduced, rows, len(reduced))


def new_draft(recipe: DraftRecipe, target: Any, rows: int, tokenizer: Any) -> LlamaForCausalLM:
    """A random draft that reads texts as long as the target does."""
    shape = recipe.shape
    torch.manual_seed(recipe.schedule.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=rows, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=shape.mlp,
            max_position_embeddings=target.max_position_embeddings, rms_norm_eps=1e-5,
            tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip


@torch.no_grad()
def embed_like(
    draft: LlamaForCausalLM, target: Path, words: Matching, counts: NDArray[np.int64]
) -> None:
    """Starts the draft's embeddings with the principal components of the target's.

    Tokens that are alike for the target are then alike for the draft from the first step on.
    A token weighs as much as the root of its count: with equal weights rare tokens choose the
    components, and the draft learns more slowly.

    Args:
        draft: Changed in place. Tokens that the target does not have stay random.
        words: How their tokens belong together.
        counts: How often each of the target's tokens was seen, ``[vocabulary]``.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    embeddings = model.get_input_embeddings().weight.float()
    known = np.flatnonzero(words.drawn[: len(embeddings)] != IGNORED)
    weights = torch.from_numpy(counts[known] + 1.0).sqrt().float()
    shared = embeddings[known]
    shared = shared - (weights @ shared) / weights.sum()
    _, vectors = torch.linalg.eigh((shared.T * weights) @ shared)
    own = draft.get_input_embeddings().weight
    projected = shared @ vectors[:, -own.shape[1] :].flip(1)
    projected *= EMBEDDING_SIZE / projected.square().mean().sqrt()
    own[words.drawn[known], : projected.shape[1]] = projected
