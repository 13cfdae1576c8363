"""Synthetic targets: the cost of a larger model, the output of a small trained one.

``python -m benchmarks.synthetic_target SOURCE FOLDER --params 800M`` writes one. Use it to time
realistic sizes, with realistic acceptance, where no trained large pair is at hand. Measuring
commands recognise a synthetic target by its config.json, and say so beside their figures.
"""

from benchmarks.synthetic_target.checkpoint import SyntheticTargetError
from benchmarks.synthetic_target.shape import SourceShape, SyntheticShape, shape_for_parameters
from benchmarks.synthetic_target.write import SyntheticTarget, write_synthetic_target

__all__ = [
    "SourceShape", "SyntheticShape", "SyntheticTarget", "SyntheticTargetError",
    "shape_for_parameters", "write_synthetic_target",
]  # fmt: skip
