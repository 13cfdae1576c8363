"""What the tokens of a model's tokenizer mean: their texts, as bytes, and roles.

Byte-level BPE writes every byte as one visible character ("Ġ" is a space). SentencePiece, and
what follows it, writes text, "▁" for a space, and "<0x0A>" for a byte that no other token has.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.sequoia")

_OF_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A byte-level vocabulary has this share of its tokens in its alphabet; a few may have been added.
_BYTE_LEVEL_SHARE = 0.99


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one model's tokenizer."""

    texts: Mapping[int, bytes]  # texts of tokens that stand for one, by number: `token_texts`
    byte_pieces: frozenset[int] = frozenset()
    """The ones that stand for a byte, which no other token has as a rule: "<0x0A>"."""
    controls: Mapping[int, str] = field(default_factory=dict)
    """Names of those that stand for no text, as "<s>"."""
    end: int | None = None
    begin: int | None = None
    unknown: int | None = None
    """Numbers of the tokens that end and begin a sequence, and stand for what cannot be spelled."""

    def within(self, size: int) -> "Vocabulary":
        """Without the tokens from this number on: the model has no rows for them."""

        roles = (self.end, self.begin, self.unknown)
        return Vocabulary(
            {number: text for number, text in self.texts.items() if number < size},
            frozenset(number for number in self.byte_pieces if number < size),
            {number: name for number, name in self.controls.items() if number < size},
            *(None if number is None or number >= size else number for number in roles),
        )

    def by_text(self) -> dict[bytes, int]:
        """The token of each text: of several the one that a tokenizer gives for it.

        A byte piece is only taken where there is no other; added tokens, which come
        last in numbers, are looked for before all others.
        """
        order = sorted(self.texts, key=lambda number: (number not in self.byte_pieces, number))
        return {text: number for number in order if (text := self.texts[number])}

    def by_name(self) -> dict[str, int]:
        """The numbers of `controls`."""
        return {name: number for number, name in self.controls.items()}


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
    pieces = frozenset(number for number, token in tokens.items() if _BYTE.fullmatch(token))
    return Vocabulary(texts, pieces, controls, *roles)


def by_merges(tokenizer: Any) -> list[int]:
    """Numbers of a tokenizer's tokens, roughly the most frequent first.

    BPE numbers tokens as it merges them, the most frequent pair first. Before them come added
    tokens, which end and structure answers, and single characters, which SentencePiece puts last.
    """
    added = tokenizer.added_tokens_decoder
    ranked = sorted(
        (number not in added, len(token) > 1, number)
        for token, number in tokenizer.get_vocab().items()
    )
    return [number for *_, number in ranked]


def _byte_level_alphabet() -> dict[int, str]:
    """What `str.translate` needs: each visible character to the one whose number is its byte.

    Bytes visible in Latin-1 stand for themselves; others got the characters from 256 on, in order.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    moved = {256 + place: chr(byte) for place, byte in enumerate(hidden)}
    # Hidden ones never stand for themselves: beyond Latin-1, so that they cannot be encoded.
    return moved | dict.fromkeys(hidden, "\uffff")


_TO_BYTES = _byte_level_alphabet()


def byte_level_text(token: str) -> bytes | None:
    """What a token of byte-level BPE stands for; None: it is no such token."""
    try:
        return token.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return None


def piece_text(token: str) -> bytes:
    """What a token of SentencePiece stands for; text without its marks stands for itself."""
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode("utf-8", errors="surrogatepass")


def token_texts(tokens: Mapping[int, str]) -> dict[int, bytes]:
    """The text of each ordinary token of a vocabulary, by number; perhaps no whole characters."""
    found = {number: byte_level_text(token) for number, token in tokens.items()}
    fitting = sum(text is not None for text in found.values())
    has_spaces = any("Ġ" in token for token in tokens.values())
    if not has_spaces or fitting < _BYTE_LEVEL_SHARE * len(tokens):  # not byte-level BPE
        return {number: piece_text(token) for number, token in tokens.items()}
    return {
        number: tokens[number].encode("utf-8", errors="surrogatepass") if text is None else text
        for number, text in found.items()
    }
