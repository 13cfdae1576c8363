"""Values that front end, engine core and workers share.

May import: compat, offload.
"""
