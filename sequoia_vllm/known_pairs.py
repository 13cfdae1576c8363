"""Draft models known to share a target's tokenizer, for ``--speculative-config sequoia``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.config import ConfigError


@dataclass(frozen=True)
class KnownPair:
    """A family of targets and the draft to use for them.

    Attributes:
        target: Pattern for the whole target name, case-insensitive.
        draft: Model name; ``{0}`` is the folder that the target lies in.
        note: Why this draft.
    """

    target: str
    draft: str
    note: str


KNOWN_PAIRS = (
    KnownPair(
        target=r".*Llama-2-(7|13|70)b.*",
        draft="JackFram/llama-68m",
        note="the paper's draft for Llama-2 targets",
    ),
    KnownPair(
        target=r".*vicuna-(7|13)b.*",
        draft="JackFram/llama-68m",
        note="Vicuna is a fine-tuned Llama with its tokenizer",
    ),
    KnownPair(
        target=r".*Llama-3\.[123]-(8|70|405)B.*",
        draft="meta-llama/Llama-3.2-1B-Instruct",
        note="the smallest model with Llama 3's tokenizer",
    ),
    KnownPair(
        target=r".*Qwen3-(4|8|14|32)B.*",
        draft="Qwen/Qwen3-0.6B",
        note="the smallest Qwen3 model",
    ),
    KnownPair(
        target=r"(.*/)?examples/models/target/?",
        draft="{0}/draft",
        note="the pair in this repository",
    ),
)


def known_draft(target: str) -> str:
    """The draft model for this target.

    Raises:
        ConfigError: If none is known; shows the JSON to write instead.
    """
    for pair in KNOWN_PAIRS:
        if re.fullmatch(pair.target, target, flags=re.IGNORECASE):
            return pair.draft.format(Path(target).parent)
    raise ConfigError(
        f"no draft model is known for the target {target!r}. Name one that has the same "
        'tokenizer: --speculative-config \'{"method": "sequoia", "model": "DRAFT"}\''
    )
