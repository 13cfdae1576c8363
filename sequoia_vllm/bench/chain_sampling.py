"""How vLLM's chain draws and verifies its drafts, as far as the installed vLLM can."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

_DRAFT_KEY = "draft_sample_method"
_REJECTION_KEY = "rejection_sample_method"
_GREEDY, _PROBABILISTIC = "greedy", "probabilistic"
_STANDARD, _BLOCK = "standard", "block"


@dataclass(frozen=True)
class ChainSampling:
    """Two keys of vLLM's speculative configuration; they matter above temperature 0.

    Attributes:
        draft: "greedy" (the draft's likeliest token) or "probabilistic" (drawn
            from its distribution).
        rejection: "standard" (token by token) or "block" (the whole chain at once).
    """

    draft: str = _GREEDY
    rejection: str = _STANDARD

    @property
    def words(self) -> list[str]:
        """What differs from vLLM's default; names a method, and is understood by `of_words`."""
        default = ChainSampling()
        return [
            value
            for value, usual in zip(
                dataclasses.astuple(self), dataclasses.astuple(default), strict=True
            )
            if value != usual
        ]

    @classmethod
    def of_words(cls, words: list[str]) -> ChainSampling | None:
        """From "probabilistic" and "block", each at most once; None: other words."""
        if len(set(words)) < len(words) or not set(words) <= {_PROBABILISTIC, _BLOCK}:
            return None
        return cls(
            _PROBABILISTIC if _PROBABILISTIC in words else _GREEDY,
            _BLOCK if _BLOCK in words else _STANDARD,
        )

    @property
    def keys(self) -> dict[str, str]:
        """What of the configuration is not vLLM's default."""
        by_key = {_DRAFT_KEY: self.draft, _REJECTION_KEY: self.rejection}
        return {key: value for key, value in by_key.items() if value in self.words}

    @property
    def needs_v2(self) -> bool:
        """Whether only Model Runner V2 does it: the other one falls back without a word."""
        return self.rejection == _BLOCK


DEFAULT = ChainSampling()
# Greedy drafts are verified as well token by token as in a block: there is one path only,
# and both accept its first i tokens with the product of the target's probabilities.
_TRIED = (DEFAULT, ChainSampling(_PROBABILISTIC), ChainSampling(_PROBABILISTIC, _BLOCK))


def is_known(sampling: ChainSampling, config_class: Any = None) -> bool:
    """Whether vLLM's speculative configuration has these keys, with these values.

    Args:
        sampling: What is asked for.
        config_class: The dataclass of the configuration; None: the installed vLLM's.
    """
    if not sampling.keys:
        return True
    if config_class is None:
        from vllm.config import SpeculativeConfig

        config_class = SpeculativeConfig
    allowed = {field.name: get_args(field.type) for field in dataclasses.fields(config_class)}
    return all(value in allowed.get(key, ()) for key, value in sampling.keys.items())


def usable(v2: bool, config_class: Any = None) -> list[ChainSampling]:
    """What is worth trying above temperature 0, vLLM's default first.

    Args:
        v2: Whether vLLM's Model Runner V2 runs it.
        config_class: As of `is_known`.
    """
    return [
        sampling
        for sampling in _TRIED
        if is_known(sampling, config_class) and (v2 or not sampling.needs_v2)
    ]
