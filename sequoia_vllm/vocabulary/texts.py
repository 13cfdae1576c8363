"""The text of a token, as bytes: whatever way a tokenizer has of spelling it.

Byte-level BPE writes every byte as one visible character ("Ġ" is a space). SentencePiece, and
what follows it, writes text, "▁" for a space, and "<0x0A>" for a byte that no other token has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Of a byte-level vocabulary, so many tokens are of its alphabet; a few may have been added.
_BYTE_LEVEL_SHARE = 0.99


def _byte_level_alphabet() -> dict[int, str]:
    """What `str.translate` needs: each visible character to the one whose number is its byte.

    Bytes that are visible in Latin-1 stand for themselves; the others got the characters from
    256 on, in order.
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


def is_byte_piece(token: str) -> bool:
    """Whether SentencePiece uses this token only where no other has the byte."""
    return _BYTE.fullmatch(token) is not None


def is_byte_level(tokens: Iterable[str]) -> bool:
    """Whether a vocabulary with these ordinary tokens is one of byte-level BPE."""
    listed = list(tokens)
    if not any("Ġ" in token for token in listed):
        return False
    fitting = sum(byte_level_text(token) is not None for token in listed)
    return fitting >= _BYTE_LEVEL_SHARE * len(listed)


def token_texts(tokens: Mapping[int, str]) -> dict[int, bytes]:
    """The text of each ordinary token of a vocabulary, by number.

    A token's text need not be whole characters.
    """
    if not is_byte_level(tokens.values()):
        return {number: piece_text(token) for number, token in tokens.items()}
    found = {number: byte_level_text(token) for number, token in tokens.items()}
    return {
        number: tokens[number].encode("utf-8", errors="surrogatepass") if text is None else text
        for number, text in found.items()
    }
