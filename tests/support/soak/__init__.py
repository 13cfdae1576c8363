"""Random requests, as users mix them, through Sequoia and plain vLLM: are the answers the same?

`tests/engine/test_differential.py` drives engines step by step; `tests/server/test_serve.py` sends
them to servers, with clients that leave. ``SEQUOIA_VLLM_SOAK`` says how many requests they send.
"""
