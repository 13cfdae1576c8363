"""One step for a batch on a host: `grow`, `score`, `verify` and `commit`, as in `reference_step`.

In torch and NumPy, without vLLM. `engine.v1` gives it vLLM's batches. Model Runner V2 keeps its
batches on a device, and has kernels for the same: `kernels`, `drafting`.
"""
