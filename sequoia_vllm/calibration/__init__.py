"""Measuring what the tree optimizer needs, on a live engine: acceptance and times.

`counts` and `step_times` are pure and need no vLLM; `acceptance` and `profile`
start engines, whose recorders (`measuring`) run inside vLLM's worker.
"""
