"""Models that cost what larger ones do and compute exactly what a small trained one does.

`shape` and `mark` need neither torch nor vLLM.
"""

from sequoia_vllm.enlarge.mark import GrowError, grown_from
from sequoia_vllm.enlarge.shape import GrownShape, SourceShape, shape_for_parameters
from sequoia_vllm.enlarge.write import Growth, grow_model

__all__ = [
    "GrowError",
    "GrownShape",
    "Growth",
    "SourceShape",
    "grow_model",
    "grown_from",
    "shape_for_parameters",
]
