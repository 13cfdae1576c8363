"""Sequoia's workers, on CPUs and GPUs.

May import: common, compat, core, offload, runner, v1, v2.
"""
