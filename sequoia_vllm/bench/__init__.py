"""Compares plain vLLM, vLLM's own chain of drafts, and Sequoia's trees.

- `methods`, `engines`: ways to decode, and a running engine for each;
- `rounds`: one round of prompts through an engine, and its rates;
- `measure`: all methods in alternating rounds, and the check of greedy outputs;
- `run`, `report`: the report and its format.
"""
