"""Random requests, as users mix them, through Sequoia and plain vLLM: are the answers the same?

`python -m benchmarks.soak engine` drives engines in this process, step by step. Tests send some to
servers, with disconnecting clients (`tests/server/test_serve.py`).
"""
