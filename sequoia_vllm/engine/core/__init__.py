"""The engine core's part: schedule, slots, grammars, adaptation, reports.

Until: vLLM's look-ahead slots follow its schedule by batch size.

May import: common, compat, offload.
"""
