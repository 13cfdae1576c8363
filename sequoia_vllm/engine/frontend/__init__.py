"""The front end's part: options, refusals, choice of draft and tree.

Until: vLLM carries a speculative method's own statistics from the worker to its loggers.

May import: common, compat, core, offload, runner, worker.
"""
