"""Drafts with another vocabulary than their target: other numbers, other tokens."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from sequoia_vllm.vocabulary.matching import Segments
from sequoia_vllm.vocabulary.tokens import load_tokenizer, read_vocabulary
from tests.support.models import DRAFT

SIZE, _SPARE_ROWS = 4096, 40
# What a renamed token's text ends with, as byte-level BPE spells two zero bytes: no text has it.
_UNHEARD_OF = "ĀĀ"
_OTHER_CONTROLS = {"<s>": "[begin]", "</s>": "[end]", "<pad>": "[pad]"}


def save_words(path: Path, tokens: dict[str, int], controls: dict[str, int]) -> None:
    """A tokenizer with these tokens; it is not made to encode.

    `controls` are numbers of what begins and ends sequences, and pads them, in this order; the
    last ones may be missing.
    """
    words = Tokenizer(models.WordLevel(tokens | controls, unk_token=next(iter(tokens))))
    words.add_special_tokens([AddedToken(name, special=True) for name in controls])
    roles = dict(zip(("bos_token", "eos_token", "pad_token"), controls, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=words, **roles).save_pretrained(path)


def draft_tokens() -> tuple[dict[str, int], dict[str, int]]:
    """The embedded pair's tokens: ordinary ones, and those that stand for no text."""
    vocabulary = json.loads((Path(DRAFT) / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    controls = {name: vocabulary.pop(name) for name in _OTHER_CONTROLS}
    return vocabulary, controls


def save_other_draft(path: Path, shared: float) -> Path:
    """The embedded draft with all tokens renumbered, and some renamed; it has rows to spare.

    Args:
        shared: So much of its ordinary tokens still have their text; single bytes always have.
    """
    generator = torch.Generator().manual_seed(0)
    number_of = torch.randperm(SIZE + _SPARE_ROWS, generator=generator)[:SIZE]
    tokens, controls = draft_tokens()
    longer = [token for token in tokens if len(token) > 1]
    count = round((1 - shared) * len(tokens))
    renamed = {longer[i] for i in torch.randperm(len(longer), generator=generator)[:count]}
    names = {token: token + _UNHEARD_OF * (token in renamed) for token in tokens}
    save_words(
        path,
        {names[token]: int(number_of[old]) for token, old in tokens.items()},
        {_OTHER_CONTROLS[name]: int(number_of[old]) for name, old in controls.items()},
    )
    return save_renumbered(DRAFT, path, number_of, SIZE + _SPARE_ROWS)


def save_draft_of_another_tokenizer(path: Path, texts: list[str], size: int) -> Path:
    """The embedded draft with byte-level BPE of at most so many tokens, learned from these texts.

    A token has the row of the draft's own token of this text, or the mean of those that spell it.
    """
    tokenizer = train_byte_level(texts, size)
    tokenizer.save_pretrained(path)
    old = read_vocabulary(load_tokenizer(DRAFT)).by_text()
    new = read_vocabulary(tokenizer)
    spelled = Segments(old)
    spellings = {number: spelled.split(text) for number, text in new.texts.items()}
    spellings |= {new.begin: [1], new.end: [2]}
    size = len(tokenizer)

    def take(rows: Tensor) -> Tensor:
        return torch.stack([rows[spellings[number]].mean(dim=0) for number in range(size)])

    return _save_with_rows(DRAFT, path, size, take, (new.begin, new.end))


_CONTROLS = {"bos_token": "<begin>", "eos_token": "<end>"}


def train_byte_level(
    texts: list[str], size: int, controls: dict[str, str] = _CONTROLS
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with so many tokens, if there are; the first are controls, by their role."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*controls.values()], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **controls)


def save_renumbered(source: str | Path, path: Path, number_of: Tensor, size: int) -> Path:
    """A Llama whose token i becomes number ``number_of[i]`` of so many; others have zero rows."""

    def take(rows: Tensor) -> Tensor:
        taken = torch.zeros(size, rows.shape[1])
        taken[number_of] = rows
        return taken

    config = json.loads((Path(source) / "config.json").read_text("utf-8"))
    begin, end = number_of[[config["bos_token_id"], config["eos_token_id"]]].tolist()
    return _save_with_rows(source, path, size, take, (begin, end))


def _save_with_rows(
    source: str | Path,
    path: Path,
    size: int,
    take: Callable[[Tensor], Tensor],
    roles: tuple[int, int],
) -> Path:
    """A Llama with other rows ``[size, H]``, taken from its own, at both ends.

    `roles` are the numbers that begin and end a sequence.
    """
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    rows = [take(end.weight.detach()) for end in ends]
    model.resize_token_embeddings(size, mean_resizing=False)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    with torch.no_grad():
        for end, taken in zip(ends, rows, strict=True):
            end.weight.copy_(taken)
    model.config.bos_token_id, model.config.eos_token_id = roles
    model.save_pretrained(path)
    return path
