"""Scores trees on Model Runner V2: masks, metadata and graphs of the target's pass.

May import: common, compat, runner.
"""
