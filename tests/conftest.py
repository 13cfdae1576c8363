"""Settings that must be in place before torch and vLLM are imported."""

import os

# One OpenMP thread: the tests' models are tiny, and two spinning threads on a
# busy two-core machine are a hundred times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
