"""Grows trees on Model Runner V2 with each kind of drafter.

May import: common, compat, core, runner, v2.attention.
"""
