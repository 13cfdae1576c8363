"""Synthetic targets: the cost of a larger model, the output of a small trained one.

``python -m benchmarks.synthetic_target SOURCE FOLDER --params 800M`` writes one. Use it to time
realistic sizes, with realistic acceptance, where no trained large pair is at hand. Measuring
commands recognise a synthetic target by its config.json, and say so beside their figures.
"""

from benchmarks.synthetic_target.checkpoint import SyntheticTargetError
from benchmarks.synthetic_target.write import write_synthetic_target

__all__ = ["SyntheticTargetError", "write_synthetic_target"]
