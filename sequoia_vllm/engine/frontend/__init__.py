"""The front end's part: options, refusals, choice of draft and tree.

May import: common, compat, offload, runner, worker.
"""
