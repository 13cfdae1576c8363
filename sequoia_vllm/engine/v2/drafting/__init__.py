"""Grows trees on Model Runner V2 with each kind of drafter.

Until: vLLM's V2 runner drafts, scores and verifies token trees itself.

May import: common, compat, core, runner, v2.attention.
"""
