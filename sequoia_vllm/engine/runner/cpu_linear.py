"""Linear layers of target and draft on CPUs without bfloat16 instructions."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers import utils

from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.linear_rows import load_kernel, pays_here, suits

KEY = "sequoia_linear_rows"
"""In vLLM's ``additional_config``, by which it keys its compiled code, as layers call another
operator. False there leaves the layers to vLLM."""


def choose_linear_layers(vllm_config: Any) -> None:
    """Lets our kernel run the linear layers of an engine on this CPU, where it pays."""
    additional, dtype = vllm_config.additional_config, vllm_config.model_config.dtype
    if pays_here(dtype) and isinstance(additional, dict):
        vllm_config.additional_config = {KEY: True, **additional}


def replaced_linear_layers(vllm_config: Any) -> AbstractContextManager[None]:
    """Within the block, layers that load take our kernel, if it was chosen."""
    additional, dtype = vllm_config.additional_config, vllm_config.model_config.dtype
    if not isinstance(additional, dict) or not additional.get(KEY) or load_kernel(dtype) is None:
        return nullcontext()
    ours = partial(_dispatch, utils.dispatch_cpu_unquantized_gemm, dtype)
    # Until: vLLM's library takes little longer for a few rows than for one on these CPUs.
    return patched(utils, "dispatch_cpu_unquantized_gemm", ours)


def _dispatch(
    original: Any, dtype: torch.dtype, layer: torch.nn.Module, remove_weight: bool
) -> None:
    """Replaces vLLM's choice of a layer's product where the kernel takes its weight."""
    weight = layer.weight
    if weight.is_meta or weight.dtype != dtype or not suits(weight):
        original(layer, remove_weight)
    else:
        layer.cpu_linear = torch.ops.sequoia_vllm.linear_rows
