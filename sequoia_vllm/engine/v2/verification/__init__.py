"""Verifies trees on Model Runner V2, with requests' sampling parameters and grammars.

Until: vLLM's V2 runner drafts, scores and verifies token trees itself.

May import: common, compat, core, runner, v2.drafting.
"""
