"""The log line on the tree that an engine starts with: which it is, and whether it pays."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sequoia_vllm.drafters.registry import DRAFTERS, DrafterKind

# Beyond these a CPU's step grows with each node, and the last of them are hardly ever accepted.
_MOST_ON_CPUS = 64


@dataclass(frozen=True)
class ExpectedGain:
    """What a tree is expected to bring.

    Attributes:
        speedup: Against plain decoding at batch size 1; None: not known.
        source: How ``speedup`` is known, such as "measured".
        tokens: Per step; None: not known.
        made_for: Another device that the tree was made for; None: it was made for this one,
            or for none.
    """

    speedup: float | None = None
    source: str = ""
    tokens: float | None = None
    made_for: str | None = None

    @property
    def pays(self) -> bool | None:
        """Whether drafting is expected to be faster than not; None: not known."""
        return None if self.speedup is None else self.speedup > 1


def gain_line(
    gain: ExpectedGain,
    draft: str,
    size: int,
    depth: int,
    *,
    adapts: bool,
    on_cpu: bool,
    drafter: DrafterKind = "model",
) -> tuple[int, str]:
    """One line for the log.

    Args:
        gain: What the tree is expected to bring.
        draft: Name of the draft.
        size: Nodes of the tree, root included.
        depth: The tree's depth, in edges.
        adapts: Whether the engine drafts as much as pays.
        on_cpu: Whether it runs on a CPU.
        drafter: What the draft is.

    Returns:
        The level of the logging module, and the line. WARNING: the user forces drafts that may
        well not pay.
    """
    doubt = _doubt(gain, size, on_cpu)
    if doubt is not None:
        words = doubt
    elif gain.speedup is not None:
        words = f"expected {gain.speedup:.2f}x plain decoding, one request ({gain.source})"
    elif gain.tokens is not None:
        words = f"expected {gain.tokens:.2f} tokens per step, if acceptance is as assumed"
    else:
        words = "what it brings is not known before it runs"
    name = DRAFTERS[drafter].short_name
    line = f"{name} {draft}; up to {size - 1} drafts, depth {depth}: {words}"
    if adapts:
        return logging.INFO, f"{line}; drafts as many as measurements show to pay"
    if doubt is None:
        return logging.INFO, line
    return logging.WARNING, f'{line}; it drafts all the same, as "adapt" or a schedule fixes that'


def _doubt(gain: ExpectedGain, size: int, on_cpu: bool) -> str | None:
    if gain.pays is False:
        return "expected not to pay here"
    if gain.made_for is not None:
        return f"made for {gain.made_for}, and may not pay here"
    if on_cpu and size > _MOST_ON_CPUS and gain.pays is None:
        return f"more drafts than usually pay on CPUs, {_MOST_ON_CPUS - 1}"
    return None
