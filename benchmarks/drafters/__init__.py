"""Tokens per step by drafter: vLLM's chain and our tree, with as many passes of the draft."""
