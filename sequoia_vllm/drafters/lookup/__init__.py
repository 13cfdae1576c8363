"""Drafts without weights: what a request's own text, and the target's own logits, say comes next.

Every node's Q is a function of the node's own token, and of what is known before the step draws
anything. So the verifiers are lossless with it, at every temperature. `verification.retrieval` adds
what the request's own text says.
"""

from sequoia_vllm.drafters.registry import Drafter, register


@register
class Lookup(Drafter):
    """A table of the target's latest successors of each token."""

    kind = "lookup"
    name = "a lookup of what followed before"
    rank = 20
    method = "draft_model"
    on_v1 = "sequoia_vllm.drafters.lookup.v1.LookupDrafterV1"
    on_v2 = "sequoia_vllm.drafters.lookup.v2.LookupDrafter"
    is_head = False
    ran_on = "an H200"
    has_weights = False
    # First children: of 256 trees that SmolLM2 and this repository's target scored. Later children
    # are rounded, as few were accepted. Deep nodes follow a match, which goes on.
    acceptance = (
        (0.31, 0.06, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01),
        (0.52, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01),
        (0.71, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01),
        (0.86, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01),
    )
