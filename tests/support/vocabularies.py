"""Drafts with another vocabulary than their target: other numbers, other tokens."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.models import DRAFT

SIZE = 4096
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


def save_other_draft(path: Path, shared: float, extra: int = 40, seed: int = 0) -> Path:
    """The embedded draft with all tokens renumbered, and some renamed.

    Args:
        path: Where to.
        shared: So much of its ordinary tokens still have their text; single bytes always have.
        extra: Rows more than it had, without tokens of their own.
        seed: Decides numbers and names.
    """
    generator = torch.Generator().manual_seed(seed)
    number_of = torch.randperm(SIZE + extra, generator=generator)[:SIZE]
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
    return save_renumbered(DRAFT, path, number_of, SIZE + extra)


def save_renumbered(source: str | Path, path: Path, number_of: Tensor, size: int) -> Path:
    """A Llama whose token i becomes number ``number_of[i]`` of so many; others have zero rows."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    old = [end.weight.detach().clone() for end in ends]
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        for end, rows in zip(
            (model.get_input_embeddings(), model.get_output_embeddings()), old, strict=True
        ):
            end.weight.zero_()
            end.weight[number_of] = rows
    begin, end = model.config.bos_token_id, model.config.eos_token_id
    model.config.bos_token_id, model.config.eos_token_id = number_of[[begin, end]].tolist()
    model.save_pretrained(path)
    return path
