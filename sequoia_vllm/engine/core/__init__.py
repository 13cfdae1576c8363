"""The engine core's part: schedule, slots, grammars, adaptation, reports.

May import: common, compat.
"""
