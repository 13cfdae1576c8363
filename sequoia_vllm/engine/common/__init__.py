"""Values that front end, engine core and workers share.

Until: vLLM carries a speculative method's own statistics from the worker to its loggers.

May import: compat, offload.
"""
