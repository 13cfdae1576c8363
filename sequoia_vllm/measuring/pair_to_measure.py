"""What a comparison needs to know of a pair to predict what it will find."""

from __future__ import annotations

from dataclasses import dataclass

from sequoia_vllm.measuring.engines import EngineSpec


@dataclass(frozen=True, kw_only=True)
class PairToMeasure:
    """A pair, and how it will be used.

    Attributes:
        engine: Models, and how engines run them.
        num_prompts: Prompts to complete.
        max_tokens: Tokens of every completion.
        temperatures: Of the requests.
        batch_sizes: Requests at once.
        context_length: Tokens of context in the middle of a completion.
        most_nodes: Of the largest tree that will be drafted, root included.
    """

    engine: EngineSpec
    num_prompts: int
    max_tokens: int
    temperatures: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    context_length: int
    most_nodes: int
