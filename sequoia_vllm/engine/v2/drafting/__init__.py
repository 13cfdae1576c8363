"""Growing trees on Model Runner V2, by each kind of drafter.

May import: common, compat, core, runner, v2.attention.
"""
