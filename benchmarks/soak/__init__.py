"""Random requests, as users mix them, through Sequoia and plain vLLM: are the answers the same?

`python -m benchmarks.soak engine` drives engines in this process, step by step;
`python -m benchmarks.soak server` a `vllm serve`, with disconnecting clients.
"""
