"""What Python runs at the start of the tests' processes that have `FOLDER` in PYTHONPATH."""

from pathlib import Path

FOLDER = str(Path(__file__).parent)
