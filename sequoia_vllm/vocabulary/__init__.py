"""Drafts with another vocabulary than the target's: token-level intersection.

A draft's distribution over its own tokens becomes one over the target's. A token that both have,
by its text (`match`), keeps its probability; all others get none. This is a Q like any other: what
is verified against it follows the target's law. A wrong match costs acceptance and nothing else.
"""
