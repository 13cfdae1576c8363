"""Drafts without weights: what a request's own text, and the target's own logits, say comes next.

Every node's Q is a function of what is known before the step draws anything, and of the node's own
token and depth. So the verifiers are lossless with it, at every temperature.
"""

from __future__ import annotations

from sequoia_vllm.drafters.registry import Drafter, register


@register
class Lookup(Drafter):
    """A table of the target's latest successors of each token, and a match in the text so far."""

    kind = "lookup"
    name = "a lookup of what followed before"
    rank = 20
    method = "draft_model"
    on_v1 = "sequoia_vllm.drafters.lookup.v1.LookupDrafterV1"
    on_v2 = "sequoia_vllm.drafters.lookup.v2.LookupDrafter"
    is_head = False
    has_weights = False
    by_default = False
    # Rounded from 85 trees of this repository's pair, whose first child told where text repeats.
    acceptance = (
        (0.38, 0.07, 0.04, 0.04, 0.03, 0.02, 0.02, 0.01),
        (0.55, 0.05, 0.04, 0.03, 0.02, 0.01, 0.01, 0.01),
        (0.75, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01),
    )
