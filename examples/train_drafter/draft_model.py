"""From the target's answers to a small Llama that drafts for it, as vLLM loads it.

A draft of a few million parameters cannot spend them on tens of thousands of rare tokens. It
gets the target's most frequent ones. The engine matches tokens of two tokenizers by their text
(docs/vocabularies.md), so that such a draft needs nothing of its own to be served.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_data import PARTS, Shard, read_recipe, read_shards
from numpy.typing import NDArray
from training import IGNORED, Recipe, Texts, cross_entropies, split, token_counts, train
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from sequoia_vllm.cli.common import Report
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.prompts import load_tokenizer
from sequoia_vllm.vocabulary.matching import Matching, match
from sequoia_vllm.vocabulary.tokens import read_vocabulary

Shape = tuple[int, int, int, int]  # hidden size, layers, heads, MLP size
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
EMBEDDING_SIZE = 0.05  # root mean square of the numbers that embeddings begin with


def distillation_loss(model: LlamaForCausalLM, texts: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the target's distribution, nats per token of an answer."""
    tokens, likely, shares = split(texts.to(model.device))
    answered = shares.sum(-1) > 0
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[answered])
    losses = cross_entropies(logits, likely[answered], shares[answered])
    return losses.sum() / max(1, len(losses))


def train_draft(
    shape: Shape, recipe: Recipe, data: Path, out: Path, report: Report
) -> dict[str, Any]:
    """Trains a draft model from a target's answers, and writes it to ``out`` in bfloat16.

    Args:
        data: The folder that `draft_data.write_draft_data` wrote.
        report: See `train`.

    Returns:
        What `train` returns, with target, shape and vocabulary.

    Raises:
        SequoiaError: The folder has no answers.
    """
    target = Path(read_recipe(data).target)
    shards = {part: read_shards(data, part) for part in PARTS}
    config = AutoConfig.from_pretrained(target)
    tokenizer, words = draft_vocabulary(
        target, config.vocab_size, shards["training"], recipe.tokens
    )
    texts = {part: Texts(found, words, recipe.sequence_length) for part, found in shards.items()}
    size = len(tokenizer) if recipe.tokens else config.vocab_size
    torch.manual_seed(recipe.seed)
    model = new_draft(shape, config, size, tokenizer)
    embed_like(model, target, words, token_counts(shards["training"], config.vocab_size))
    model.to(recipe.device)
    record = train(model, lambda batch: distillation_loss(model, batch), texts, recipe, report)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {"target": str(target), "shape": shape, "vocabulary": size, **record}


def draft_vocabulary(
    target: Path, rows: int, shards: Sequence[Shard], tokens: int
) -> tuple[Any, Matching]:
    """The draft's tokenizer of so many ``tokens`` (0: all), counted in the shards, and how they
    belong to the target's, whose logits have these ``rows``."""
    tokenizer = load_tokenizer(str(target))
    if not tokens or tokens >= len(tokenizer):
        return tokenizer, Matching.of_same_numbers(rows)
    reduced = reduced_tokenizer(tokenizer, token_counts(shards, rows), tokens)
    return reduced, matching(tokenizer, reduced, rows, len(reduced))


def new_draft(shape: Shape, target: Any, rows: int, tokenizer: Any) -> LlamaForCausalLM:
    """A random draft that reads texts as long as the target does."""
    hidden, layers, heads, mlp = shape
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=rows, hidden_size=hidden, num_hidden_layers=layers,
            num_attention_heads=heads, intermediate_size=mlp,
            max_position_embeddings=target.max_position_embeddings, rms_norm_eps=1e-5,
            tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip


@torch.no_grad()
def embed_like(
    draft: LlamaForCausalLM, target: Path, words: Matching, counts: NDArray[np.int64]
) -> None:
    """Starts the draft's embeddings with the principal components of the target's, in place.

    Tokens that are alike for the target are then alike for the draft from the first step on. A
    token weighs as much as the root of its count, ``[vocabulary]``: with equal weights rare tokens
    choose the components, and the draft learns more slowly. Tokens that the target does not have
    stay random.
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


def reduced_tokenizer(target: Any, counts: NDArray[np.int64], size: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer with the target's most seen tokens (``counts``): special tokens and
    characters are always among them, and what a token is merged from."""
    backend = getattr(target, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {}
    model = described.get("model", {})
    if model.get("type") != "BPE":
        raise SequoiaError(
            "the target's tokenizer is no byte-pair encoding, which alone can be reduced: keep all "
            "of its tokens, with --tokens 0"
        )
    vocabulary: dict[str, int] = model["vocab"]
    merges = [
        tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"]
    ]
    added = {one["content"] for one in described["added_tokens"]}
    kept = _closed_set(vocabulary, merges, added, counts, size)
    order = sorted(
        kept, key=lambda token: vocabulary.get(token, target.convert_tokens_to_ids(token))
    )
    numbers = {token: number for number, token in enumerate(order)}
    model["vocab"] = {token: numbers[token] for token in order if token in vocabulary}
    model["merges"] = [
        [left, right] for left, right in merges if {left, right, left + right} <= kept
    ]
    for one in described["added_tokens"]:
        one["id"] = numbers[one["content"]]
    _renumber(described.get("post_processor"), numbers)
    from tokenizers import Tokenizer

    names = {role: getattr(target, role) for role in _ROLES if getattr(target, role)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), **names
    )


def _closed_set(
    vocabulary: dict[str, int],
    merges: list[tuple[str, ...]],
    added: set[str],
    counts: NDArray[np.int64],
    size: int,
) -> set[str]:
    """Special tokens, characters, and the most frequent tokens with all that they are made of."""
    parts: dict[str, tuple[str, ...]] = {}
    for pair in merges:
        parts.setdefault("".join(pair), pair)
    kept = added | {token for token in vocabulary if token not in parts}
    if len(kept) > size:
        raise SequoiaError(f"--tokens {size}: special tokens and characters alone are {len(kept)}")

    def missing(token: str) -> set[str]:
        if token in kept:
            return set()
        return {token}.union(*map(missing, parts[token]))

    for token in sorted(vocabulary, key=lambda token: -counts[vocabulary[token]]):
        needed = missing(token)
        if len(kept) + len(needed) <= size:
            kept |= needed
    return kept


def _renumber(part: Any, numbers: dict[str, int]) -> None:
    """Gives the special tokens in a tokenizer's post-processor their new numbers."""
    for one in (part or {}).get("processors", []):
        _renumber(one, numbers)
    for one in ((part or {}).get("special_tokens") or {}).values():
        one["ids"] = [numbers[token] for token in one["tokens"]]


def matching(target: Any, draft: Any, target_size: int, draft_size: int) -> Matching:
    known = [read_vocabulary(tokenizer) for tokenizer in (target, draft)]
    if known[0] is None or known[1] is None:
        raise SequoiaError("the tokenizer does not tell what its tokens mean")
    return match(known[0], known[1], target_size, draft_size)
