"""Measuring what the tree optimizer needs, on a live engine: acceptance and times.

`counts` is pure and needs no vLLM; `measure_acceptance` and
`measure_profile` start engines, whose recorders (`measuring`) run inside vLLM's worker.
"""
