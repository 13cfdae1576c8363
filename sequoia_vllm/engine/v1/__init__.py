"""Sequoia on vLLM's V1 runner, the default on CPUs. It goes when vLLM drops that runner.

May import: common, compat, core, runner.
"""
