"""What a model's token numbers mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one model's tokenizer.

    Attributes:
        texts: What each token that stands for text stands for, by number; see `token_texts`.
        byte_pieces: Those of them that stand for a byte that no other token has, as a rule:
            "<0x0A>".
        controls: Names of those that stand for no text, as "<s>".
        end, begin, unknown: Numbers of the tokens that end and begin a sequence, and of the one
            for what cannot be spelled.
    """

    texts: Mapping[int, bytes]
    byte_pieces: frozenset[int] = frozenset()
    controls: Mapping[int, str] = field(default_factory=dict)
    end: int | None = None
    begin: int | None = None
    unknown: int | None = None

    def within(self, size: int) -> Vocabulary:
        """Without the tokens from this number on: the model has no rows for them."""

        def kept(number: int | None) -> int | None:
            return number if number is not None and number < size else None

        return Vocabulary(
            {number: text for number, text in self.texts.items() if number < size},
            frozenset(number for number in self.byte_pieces if number < size),
            {number: name for number, name in self.controls.items() if number < size},
            kept(self.end),
            kept(self.begin),
            kept(self.unknown),
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
