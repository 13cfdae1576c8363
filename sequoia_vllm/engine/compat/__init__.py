"""Everything that depends on the version of vLLM.

May import: none.
"""
