"""Verifying trees on Model Runner V2, with requests' parameters and grammars.

May import: common, compat, core, runner, v2.drafting.
"""
