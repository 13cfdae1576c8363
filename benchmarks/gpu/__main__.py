"""``python -m benchmarks.gpu``, also from a checkout that is not installed."""

import sys

from benchmarks.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
