"""Mixtures of experts: which weights a pass multiplies with, and which it reads.

Each token goes to a few of a layer's experts. A pass over more rows reads more of them. We assume
that tokens choose independently of each other, and no expert is preferred. Real tokens share more
experts, so real passes read less.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sequoia_vllm.drafters.fields import Fields, ShapeError
from sequoia_vllm.json_file import FileModel


class Experts(FileModel):
    """The routed experts of a model's sparse layers, and what is beside them."""

    count: int = Field(ge=2, description="Routed experts of a layer.")
    per_token: int = Field(ge=1, description="Routed experts that a token goes to.")
    width: int = Field(ge=1, description="Width of a routed expert.")
    layers: int = Field(ge=1, description="Layers with experts; the others are dense.")
    shared: int = Field(default=0, ge=0, description="Width of what every token goes to, too.")
    weight_bytes: float | None = Field(
        default=None,
        gt=0,
        description="Bytes of a routed expert's weight, where these alone are quantized; none: as "
        "of the layers' others.",
    )

    def read_by(self, rows: float) -> float:
        """Routed experts of a layer that a pass over so many rows is expected to read."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)

    def routed_parameters(self, experts: float, hidden: int) -> float:
        """Parameters of so many routed experts in each sparse layer."""
        return self.layers * experts * 3 * hidden * self.width

    def other_parameters(self, hidden: int) -> int:
        """Parameters of the sparse layers' routers and shared experts."""
        return self.layers * hidden * (self.count + 3 * self.shared)


# Names of the same fields in different families.
_COUNT = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip
_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts",
    "moe_topk", "moe_top_k", "moe_k",
)  # fmt: skip
_WIDTH = "moe_intermediate_size", "intermediate_size"
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
)  # fmt: skip
_SHARED_COUNT = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
_DENSE_FIRST = "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"
_EVERY = "decoder_sparse_step", "moe_layer_interval", "moe_layer_freq"
# Types whose layers do more than these fields say.
_UNMODELLED = frozenset({"arctic", "doge", "jetmoe", "llama4_text", "zaya"})


def read_experts(config: Fields, layers: int) -> Experts | None:
    """The experts that a configuration describes; None: the model is dense.

    Raises:
        ShapeError: It does not say enough.
    """
    count = _first(config, _COUNT)
    if not isinstance(count, int) or count < 2:
        return None
    sparse = sum(_is_sparse(config, layer) for layer in range(layers))
    if not sparse:
        return None
    name = f"{config.name} is a mixture of experts"
    if config.value("model_type") in _UNMODELLED:
        raise ShapeError(f"{name} whose layers are not modelled")
    per_token, width = _first(config, _PER_TOKEN), _first(config, _WIDTH)
    if not isinstance(per_token, int) or not 1 <= per_token <= count:
        raise ShapeError(f"{name}, and its configuration does not say how many a token goes to")
    if not isinstance(width, int) or width < 1:
        raise ShapeError(f"{name}, and its configuration does not say how wide they are")
    shared = _first(config, _SHARED_WIDTH) or (_first(config, _SHARED_COUNT) or 0) * width
    if config.value("enable_moe_block"):  # the dense MLP stays beside the experts
        shared += config.count("intermediate_size")
    return Experts(count=count, per_token=per_token, width=width, layers=sparse, shared=shared)


def _is_sparse(config: Fields, layer: int) -> bool:
    """Whether a layer has experts; without a word about it each has."""
    if types := config.value("mlp_layer_types"):
        return layer >= len(types) or types[layer] != "dense"
    if layer in (config.value("mlp_only_layers") or ()):
        return False
    if layer < (_first(config, _DENSE_FIRST) or 0):
        return False
    last = config.value("moe_layer_end_index")
    if last is not None and 0 <= last < layer:
        return False
    every = next((found for key in _EVERY if (found := config.value(key))), 1)
    if isinstance(every, (list, tuple)):
        return layer >= len(every) or bool(every[layer])
    return (layer + 1) % int(every) == 0


def _first(config: Fields, names: tuple[str, ...]) -> Any:
    """The first of these fields that is there; of a list, with a number a layer, the largest."""
    found = next((value for name in names if (value := config.value(name)) is not None), None)
    if isinstance(found, (list, tuple)):
        return max((entry for entry in found if isinstance(entry, int)), default=None)
    return found
