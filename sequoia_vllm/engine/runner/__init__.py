"""Parts of workers that both model runners use.

May import: common, compat.
"""
