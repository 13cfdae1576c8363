"""The sizes of a Llama model."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Shape:
    """Hidden size × layers × attention heads × MLP size."""

    hidden: int
    layers: int
    heads: int
    mlp: int

    def __post_init__(self) -> None:
        if min(astuple(self)) < 1:
            raise ValueError(f"{self}: every size is at least 1")
        # Rotary embeddings turn pairs of a head's dimensions.
        if self.hidden % (2 * self.heads):
            raise ValueError(f"{self}: the hidden size is not a multiple of 2 × heads")

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads ``HIDDENxLAYERSxHEADSxMLP``."""
        sizes = text.split("x")
        if len(sizes) != 4 or not all(size.isdecimal() for size in sizes):
            raise ValueError(f"{text!r} is not HIDDENxLAYERSxHEADSxMLP, such as 256x4x4x672")
        return cls(*map(int, sizes))
