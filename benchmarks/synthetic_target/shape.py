"""Depth and width of a synthetic target."""

import math
from dataclasses import dataclass

from benchmarks.synthetic_target.checkpoint import SyntheticTargetError

# MLP widths are multiples of this: matrix kernels and tensor parallelism like them.
WIDTH_STEP = 64
# Largest deviation from the number of parameters asked for.
TOLERANCE = 0.02
# Models in use have about 24 layers at 1B parameters, 42 at 8B and 75 at 70B.
_LAYERS_AT_1B, _DEPTH_EXPONENT = 24, 0.27
_MOST_LAYERS = 512


@dataclass(frozen=True)
class SourceShape:
    """Sizes of the source model, as parameter counts.

    Attributes:
        width: MLP width (``intermediate_size``).
        hidden: Hidden size; the counts below are for it.
        outside: Parameters outside the layers: embeddings, final norm.
        per_layer: Parameters of a layer outside the columns of its MLP.
        per_column: Parameters that one more column of MLP width adds to a layer.
    """

    layers: int
    width: int
    hidden: int
    outside: int
    per_layer: int
    per_column: int

    def parameters(self, layers: int, width: int) -> int:
        """Parameters with this many layers of this MLP width."""
        return self.outside + layers * (self.per_layer + width * self.per_column)


@dataclass(frozen=True)
class SyntheticShape:
    """Decoder layers, MLP width, hidden size and parameters of a synthetic target."""

    layers: int
    width: int
    hidden: int
    parameters: int


def explicit_shape(source: SourceShape, layers: int | None, width: int | None) -> SyntheticShape:
    """Returns the shape with these sizes; None keeps the source's own."""
    layers, width = layers or source.layers, width or source.width
    for what, asked, own in (("layers", layers, source.layers), ("width", width, source.width)):
        if asked < own:
            raise SyntheticTargetError(
                f"{asked} {what}: the source already has {own}, and sizes are only added to; give "
                f"{own} or more"
            )
    return SyntheticShape(layers, width, source.hidden, source.parameters(layers, width))


def shape_for_parameters(source: SourceShape, parameters: float) -> SyntheticShape:
    """A shape of about this many parameters, as deep as models of that size usually are. The MLP's
    width takes up what depth and the hidden size do not."""
    own = source.parameters(source.layers, source.width)
    if parameters < own * (1 - TOLERANCE):
        raise SyntheticTargetError(
            f"{parameters:.4g} parameters: the source already has {own:,}; give more"
        )
    usual = _LAYERS_AT_1B * (parameters / 1e9) ** _DEPTH_EXPONENT

    def rank(shape: SyntheticShape) -> tuple[bool, float]:
        missed = abs(shape.parameters / parameters - 1)
        return missed > TOLERANCE, missed if missed > TOLERANCE else _distance(shape.layers, usual)

    best = min(
        (_with_layers(source, layers, parameters) for layers in range(source.layers, _MOST_LAYERS)),
        key=rank,
    )
    if rank(best)[0]:
        raise SyntheticTargetError(
            f"{parameters:.4g} parameters cannot be met within {TOLERANCE:.0%}: the nearest shape "
            f"has {best.parameters:,} ({best.layers} layers, MLP width {best.width}); ask for "
            "that, or give --layers and --width"
        )
    return best


def _with_layers(source: SourceShape, layers: int, parameters: float) -> SyntheticShape:
    columns = (parameters - source.outside) / layers - source.per_layer
    width = round(columns / source.per_column / WIDTH_STEP) * WIDTH_STEP
    return explicit_shape(source, layers, max(width, source.width))


def _distance(layers: int, usual: float) -> float:
    return abs(math.log(layers / usual))
