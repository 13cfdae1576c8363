"""``python -m benchmarks.gpu.check``, also from a checkout that is not installed."""

import sys

from benchmarks.gpu.check.command import main

if __name__ == "__main__":
    sys.exit(main())
