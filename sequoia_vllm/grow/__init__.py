"""Models that cost what larger ones do and compute exactly what a small trained one does.

`shape` and `mark` need neither torch nor vLLM.
"""

from sequoia_vllm.grow.mark import GrowError, grown_from
from sequoia_vllm.grow.shape import GrownShape, SourceShape, shape_for_parameters
from sequoia_vllm.grow.write import Growth, grow_model

__all__ = [
    "GrowError",
    "GrownShape",
    "Growth",
    "SourceShape",
    "grow_model",
    "grown_from",
    "shape_for_parameters",
]
