"""Side by side: plain vLLM, vLLM's own chain of drafts, and Sequoia's trees.

`methods`, `decode_rate`, `outputs`, `report` and `summary` are pure. `engines` and
`measure` run engines, with `worker` inside vLLM's worker; `predict` asks the
cost model; `run` makes the report of it all, and `plot` draws it.
"""
