"""``python -m sequoia_vllm.gpu_check``, also in a checkout that is not installed."""

import sys

from sequoia_vllm.gpu_check import main

if __name__ == "__main__":
    sys.exit(main())
