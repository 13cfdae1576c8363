"""Compares tokens of target and draft: do equal numbers mean the same, and what is shared?"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.prompts import load_prompts
from sequoia_vllm.vocabulary.mapped import MappedVocabulary, SharedVocabulary
from sequoia_vllm.vocabulary.matching import Matching, match
from sequoia_vllm.vocabulary.tokens import by_merges, load_tokenizer, read_vocabulary

# Up to this share of other tokens, numbers are taken as they are: fine-tuned models rename a few.
_TOLERATED = 0.01
# Share of the smaller vocabulary. Below it a draft would be accepted as seldom as a wrong one.
_LEAST_SHARED = 0.05
_FITTING_DRAFT = 'give "model" a draft of the target\'s family, with its tokenizer'


@dataclass(frozen=True)
class TokensOf:
    """Where a model's tokens are found."""

    tokenizer: str  # name or path of the model, or of its tokenizer
    size: int  # rows of its logits
    revision: str | None = None  # the tokenizer's revision, on the Hub
    trust_remote_code: bool = False  # whether it may bring code of its own
    is_readable: bool = True  # whether it may be loaded, the usual way

    @classmethod
    def target(cls, config: Any) -> "TokensOf":
        """Tokens of a target, by vLLM's configuration of it."""
        reads = not config.skip_tokenizer_init and config.tokenizer_mode in ("auto", "hf", "slow")
        return cls(
            config.tokenizer, config.get_vocab_size(), config.tokenizer_revision,
            config.trust_remote_code, reads,
        )  # fmt: skip

    @classmethod
    def draft(cls, config: Any) -> "TokensOf":
        """Tokens of a draft, by vLLM's configuration of it."""
        return cls(config.model, config.get_vocab_size(), config.revision, config.trust_remote_code)

    def load(self) -> Any | None:
        """The tokenizer; None: there is none that may be or could be read."""
        if not self.is_readable:
            return None
        return load_tokenizer(self.tokenizer, self.revision, self.trust_remote_code)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two vocabularies."""

    matching: Matching | None  # which tokens mean the same; None: numbers mean the same in both
    in_words: str = ""  # what differs, for a log; "": nothing does


@lru_cache(maxsize=8)
def compare_vocabularies(target: TokensOf, draft: TokensOf) -> Comparison:
    """Compares all tokens of two models by their text.

    Raises:
        ConfigError: The draft cannot serve: tokens cannot be matched, or too few are shared.
    """
    if target.size == draft.size and _same_files(target.tokenizer, draft.tokenizer):
        return Comparison(None)
    theirs, tokenizer = None, target.load()
    ours = None if tokenizer is None else read_vocabulary(tokenizer)
    if ours is not None and (of_draft := draft.load()) is not None:
        theirs = read_vocabulary(of_draft)
    if ours is None or theirs is None:
        if target.size == draft.size:
            return Comparison(None)
        why = "not both bring a tokenizer that could be read"
        if not target.is_readable:
            why = "vLLM is to load no tokenizer, or one in a way of its own"
        raise ConfigError(
            f"the draft model {draft.tokenizer!r} has {draft.size:,} tokens and the target "
            f"{target.tokenizer!r} {target.size:,}, and they cannot be matched by their text, "
            f"since {why}: {_FITTING_DRAFT}, or let tokenizers be read (skip_tokenizer_init, "
            "tokenizer_mode)"
        )
    differing, share = difference(ours.texts, theirs.texts)
    if target.size == draft.size and share <= _TOLERATED:
        return Comparison(None, differing and f"the vocabularies differ a little: {differing}")
    matching = match(ours, theirs, target.size, draft.size)
    if matching.num_shared < _LEAST_SHARED * min(target.size, draft.size):
        raise ConfigError(
            f"the draft model {draft.tokenizer!r} has another vocabulary than the target "
            f"{target.tokenizer!r}: of its {draft.size:,} tokens only {matching.num_shared:,} are "
            f"also the target's, and it would hardly ever be accepted: {_FITTING_DRAFT}, or one "
            "with more tokens of the same text"
        )
    shared, size = matching.num_shared, len(matching.drawn)
    in_text = _share_of_text(matching.drawn >= 0, tokenizer)
    return Comparison(
        matching,
        f"the draft {draft.tokenizer} has another vocabulary, and drafts tokens that are the "
        f"target's too: {shared:,} of the target's {size:,} ({shared / size:.0%}), of which "
        f"{in_text:.0%} of ordinary text is made",
    )


def draft_vocabulary(
    vllm_config: Any, model: torch.nn.Module, device: torch.device
) -> SharedVocabulary:
    """Makes the mapping by which an engine's draft reads, and gives logits of, the target's tokens.

    Args:
        model: The draft. With `SequoiaConfig.draft_vocabulary` its output layer is trimmed.
        device: Where the mapping's tables go.

    Raises:
        ConfigError: The worker reads other tokenizers, or the output layer cannot be trimmed.
    """
    settings = SequoiaSettings.of(vllm_config)
    if not settings.maps_vocabulary and settings.draft_tokens is None:
        return SharedVocabulary()
    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    matching: Matching | None = Matching.of_same_numbers(target.get_vocab_size())
    if settings.maps_vocabulary:
        matching = compare_vocabularies(TokensOf.target(target), TokensOf.draft(draft)).matching
    if matching is None:
        raise ConfigError(
            f"the tokenizers of {target.tokenizer!r} and {draft.model!r} "
            "cannot be read by this worker as they were where the engine was configured: give "
            "every node the same files"
        )
    if settings.draft_tokens is not None:
        rows, matching = matching.trimmed(settings.draft_tokens)
        trim_output(model, torch.from_numpy(rows).to(device), draft)
    return MappedVocabulary(matching, device)


def tokens_to_draft(given: int | list[int], target: TokensOf) -> tuple[list[int], str]:
    """The target's tokens that a draft's output layer keeps, and a line on them for the log.

    Args:
        given: The tokens, or how many: then the first by the tokenizer's merges.

    Raises:
        ConfigError: The target has no such tokens, or no tokenizer that could be read.
    """
    tokenizer = target.load()
    if isinstance(given, int):
        if tokenizer is None:
            raise ConfigError(
                f"the tokenizer of {target.tokenizer!r} cannot be read, by which "
                f'"draft_vocabulary": {given} chooses tokens: give a file of token ids'
            )
        given = [token for token in by_merges(tokenizer) if token < target.size][:given]
    if max(given) >= target.size:
        raise ConfigError(
            f'"draft_vocabulary" has token {max(given)}, and the target {target.size:,} tokens: '
            "give ids of the target's tokens"
        )
    words = f"the draft computes logits of {len(given):,} of the target's {target.size:,} tokens"
    if tokenizer is not None:
        is_drafted = np.isin(np.arange(target.size), given)
        words += f", of which {_share_of_text(is_drafted, tokenizer):.0%} of ordinary text is made"
    return given, words


def difference(target: Mapping[int, bytes], draft: Mapping[int, bytes]) -> tuple[str, float]:
    """Compares the texts of two vocabularies' tokens, number by number.
    The difference is in words, and as a share of all numbers; "" and 0 where there is none."""
    numbers = target.keys() | draft.keys()
    wrong = [number for number in numbers if target.get(number) != draft.get(number)]
    if not wrong:
        return "", 0.0
    first = min(wrong)
    of_target, of_draft = (
        None if text is None else text.decode(errors="replace")
        for text in (target.get(first), draft.get(first))
    )
    words = (
        f"{len(wrong):,} of {len(numbers):,} tokens differ, the first is number {first}: "
        f"{of_target!r} of the target, {of_draft!r} of the draft"
    )
    return words, len(wrong) / len(numbers)


def _share_of_text(is_drafted: NDArray[np.bool_], tokenizer: Any) -> float:
    """Share of the built-in prompts, as the target reads them, that tokens ``[Vt]`` make up."""
    numbers = [
        number
        for prompt in load_prompts(None, None)
        for number in tokenizer.encode(prompt.prompt or "", add_special_tokens=False)
    ]
    known = [number for number in numbers if number < len(is_drafted)]
    return float(is_drafted[known].sum()) / max(len(numbers), 1)


def _same_files(target: str, draft: str) -> bool:
    """Whether both are folders whose tokenizers are the same, byte for byte."""
    ours, theirs = (Path(model) / "tokenizer.json" for model in (target, draft))
    return ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes()


def trim_output(model: torch.nn.Module, rows: Tensor, config: Any) -> None:
    """Has `compute_logits` of a draft give only some rows of its logits.

    The whole layer stays: tied models embed with it, and loaders write to it. Ranks of a
    tensor-parallel group share the rows that are kept evenly, whoever had them.

    Args:
        rows: int64 ``[n]``: the rows that logits ``[rows, n]`` are for, in this order.

    Raises:
        ConfigError: The layer is not one matrix with plain rows.
    """
    calls: list[tuple[Any, ...]] = []
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    hooks = [
        processor.register_forward_pre_hook(lambda *call: calls.append(call))
        for processor in processors
    ]
    states = torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=rows.device)
    with torch.inference_mode():
        model.compute_logits(states)
    for hook in hooks:
        hook.remove()
    if len(calls) != 1 or not _has_plain_rows(*calls[0][1]):
        raise ConfigError(
            f"the output layer of the draft {config.model!r} cannot be trimmed, as it is quantized "
            'or more than one matrix: leave "draft_vocabulary" out, or give "model" another draft'
        )
    [(processor, (layer, *_))] = calls
    trimmed = _with_rows(layer, rows)
    processor.org_vocab_size = len(rows)
    processor.register_forward_pre_hook(lambda _, args: (trimmed, *args[1:]))


def _has_plain_rows(layer: Any, states: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a logits processor that is called so multiplies with a matrix, and no more."""
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    return bias is None and isinstance(layer.quant_method, plain) and layer.weight.dim() == 2


def _with_rows(layer: Any, rows: Tensor) -> ParallelLMHead:
    """A layer of its own with these rows of another one, over the same ranks."""
    shard = layer.shard_indices
    own = rows - shard.org_vocab_start_index
    is_here = (own >= 0) & (own < shard.num_org_elements)
    weight = layer.weight.new_zeros(len(rows), layer.weight.shape[1])
    weight[is_here] = layer.weight.detach()[own[is_here]]
    if layer.tp_size > 1:
        weight = get_tp_group().all_reduce(weight)
    with torch.device(rows.device):
        made = ParallelLMHead(
            *weight.shape, params_dtype=weight.dtype, disable_tp=layer.tp_size == 1
        )
    first, last = made.shard_indices.org_vocab_start_index, made.shard_indices.org_vocab_end_index
    made.weight.data.zero_()  # beyond the last rank's rows there is padding
    made.weight.data[: last - first] = weight[first:last]
    made.quant_method.process_weights_after_loading(made)
    return made
