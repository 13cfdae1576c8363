"""Which of our layers with states a model may have."""

from collections.abc import Sequence

from sequoia_vllm.engine.compat.contract import check_model
from sequoia_vllm.engine.v2.attention.mamba_layers import (
    ConvTreeLayer,
    GdnTreeLayer,
    MambaTreeLayer,
)


def layers_of(architectures: Sequence[str]) -> list[type]:
    """Our layers with states that models of these architectures may have.

    Some classes lie in vLLM's modules of whole models. Other engines need not import these.
    """
    found: list[type] = [GdnTreeLayer, MambaTreeLayer, ConvTreeLayer]
    if any(name.startswith("Kimi") for name in architectures):
        check_model("kimi_k3")
        from sequoia_vllm.engine.v2.attention import kda_layers

        found += [kda_layers.KdaTreeLayer, kda_layers.K3TreeLayer]
    if any(name.startswith("Bailing") for name in architectures):
        from sequoia_vllm.engine.v2.attention import bailing_layers

        found += [bailing_layers.LinearTreeLayer, bailing_layers.BailingKdaTreeLayer]
    return found
