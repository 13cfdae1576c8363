"""Vocabularies from models' tokenizers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sequoia_vllm.vocabulary.texts import is_byte_piece, token_texts
from sequoia_vllm.vocabulary.tokens import Vocabulary

logger = logging.getLogger("vllm.sequoia")

_OF_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_tokenizer(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> Any | None:
    """The tokenizer of a model, name or path; None: it brings none that could be read."""
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).is_file() for name in _OF_TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of any tokenizer's own code; vLLM says what it needs of it
        logger.debug("Sequoia: the tokenizer of %s cannot be read: %s", model, error)
        return None


def read_vocabulary(tokenizer: Any) -> Vocabulary | None:
    """What its tokens mean; None: it does not tell, or has none."""
    try:
        added = tokenizer.added_tokens_decoder
        tokens = {
            number: token for token, number in tokenizer.get_vocab().items() if number not in added
        }
        roles = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
    except Exception as error:
        logger.debug("Sequoia: a tokenizer does not tell its tokens: %s", error)
        return None
    if not tokens:
        return None
    # Tokens that are added without being special are written as the text that they stand for.
    written = {number: one.content for number, one in added.items() if not one.special}
    texts = token_texts(tokens) | {number: text.encode() for number, text in written.items()}
    controls = {number: one.content for number, one in added.items() if one.special}
    pieces = frozenset(number for number, token in tokens.items() if is_byte_piece(token))
    return Vocabulary(texts, pieces, controls, *roles)
