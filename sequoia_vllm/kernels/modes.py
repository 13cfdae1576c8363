"""Modes by which kernels draw and verify a request's drafts."""

SKIP = -1
"""No drafts: nothing is drawn, nothing accepted."""
GREEDY = 0
"""Temperature 0: the draft's best tokens; the target's best token decides."""
SAMPLED = 1
"""Children drawn from Q without replacement; verified by Algorithm 2."""
SEEDED = 2
"""A seed: children drawn under the noise that decides the target's own token."""
