"""These tests run in a process whose Triton interprets kernels: see tests/unit/test_kernels.py."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*"]
