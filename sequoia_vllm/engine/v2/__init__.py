"""Sequoia on vLLM's Model Runner V2, the default on GPUs.

Until: vLLM's V2 runner drafts, scores and verifies token trees itself.

May import: common, compat, core, offload, runner, v2.attention, v2.drafting, v2.verification.
"""
