"""Are kernels right and engines fast on this GPU? See ``--help``; nothing need be installed.

$ python examples/gpu_check.py --output gpu-run
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
