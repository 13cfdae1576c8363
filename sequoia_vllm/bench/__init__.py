"""Side by side: plain vLLM, vLLM's own chain of drafts, and Sequoia's trees.

`methods`, `steady`, `outputs`, `report` and `summary` are pure; `engines` and
`measure` run engines; `worker` runs inside vLLM's worker; `plot` draws.
"""
