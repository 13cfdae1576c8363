"""Sequoia on vLLM's V1 runner, the default on CPUs; removed once vLLM drops that runner.

May import: common, compat, core, runner.
"""
