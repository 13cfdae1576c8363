"""Scores trees on Model Runner V2: masks, metadata and graphs of the target's pass.

Until: vLLM's attention kernels take a tree mask per request.

May import: common, compat, runner.
"""
