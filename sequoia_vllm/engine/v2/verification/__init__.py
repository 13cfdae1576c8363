"""Verifies trees on Model Runner V2, with requests' sampling parameters and grammars.

May import: common, compat, core, runner, v2.drafting.
"""
