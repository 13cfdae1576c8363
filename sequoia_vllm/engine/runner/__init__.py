"""Parts of workers that both model runners use.

Until: vLLM's CPU kernel takes a tree mask.

May import: common, compat.
"""
