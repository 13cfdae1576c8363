"""Sequoia's workers, on CPUs and GPUs.

Until: the worker asks a method for its runner class.

May import: common, compat, core, offload, runner, v1, v2.
"""
