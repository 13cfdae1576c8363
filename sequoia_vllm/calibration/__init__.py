"""Measures acceptance and step times on a live engine, for the tree optimizer.

`acceptance_task` is pure and needs no vLLM. `measure_acceptance` and `measure_profile` start
engines; their counters and recorders (`measuring`) run inside vLLM's worker.
"""
