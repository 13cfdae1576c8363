"""Side by side: plain vLLM, vLLM's own chain of drafts, and Sequoia's trees.

`methods`, `decode_rate`, `outputs`, `parts`, `report` and `summary` are pure.
`engines` and `measure` run engines, whose recorders (`measuring`) run inside vLLM's
worker; `predict` asks the cost model; `run` makes the report of it all, and
`report_figures` draws it.
"""
