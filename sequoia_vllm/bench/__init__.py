"""Compares plain vLLM, vLLM's own chain of drafts, and Sequoia's trees.

- `methods`, `engines`: ways to decode, and a running engine for each;
- `measure`: all methods in alternating rounds, rates, and the check of greedy outputs;
- `report`: the report, its format and its picture.
"""
