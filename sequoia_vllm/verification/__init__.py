"""Drafting without replacement and tree verification, in torch, without vLLM.

`methods` lists the ways to verify; `walk` is the paper's, and `sampling` draws the drafts for it.
"""
