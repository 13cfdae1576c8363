"""Text as tokens of a vocabulary, where its tokenizer would add what is not in the text."""

from __future__ import annotations

from collections.abc import Mapping


class Segments:
    """Splits text into tokens, from the left, each as long as there is one.

    That is mostly what a tokenizer does with the text of one token of another: it is short.
    Tokenizers themselves put spaces before it, or take bytes that are no whole character for
    something else.

    Args:
        tokens: Number of the token of each text, of at least one byte.
    """

    def __init__(self, tokens: Mapping[bytes, int]) -> None:
        self._tokens = tokens
        self._longest = max(map(len, tokens), default=0)

    def split(self, text: bytes) -> list[int] | None:
        """The tokens whose texts, one after another, are this text; None: some byte has none."""
        found = []
        start = 0
        while start < len(text):
            end = min(start + self._longest, len(text))
            while end > start and text[start:end] not in self._tokens:
                end -= 1
            if end == start:
                return None
            found.append(self._tokens[text[start:end]])
            start = end
        return found
