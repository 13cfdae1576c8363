"""An output layer with some of a draft model's rows: a level then reads less memory."""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from sequoia_vllm.config import ConfigError


def trim_output(model: torch.nn.Module, rows: Tensor, config: Any) -> None:
    """Has `compute_logits` of a draft give these rows of its logits only.

    The whole layer stays: tied models embed with it, and loaders write to it. Ranks of a
    tensor-parallel group share the rows that are kept evenly, whoever had them.

    Args:
        rows: int64 ``[n]``: the rows that logits ``[rows, n]`` are for, in this order.

    Raises:
        ConfigError: The layer is not one matrix with plain rows.
    """
    calls: list[tuple[Any, ...]] = []
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    hooks = [
        processor.register_forward_pre_hook(lambda *call: calls.append(call))
        for processor in processors
    ]
    states = torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=rows.device)
    with torch.inference_mode():
        model.compute_logits(states)
    for hook in hooks:
        hook.remove()
    if len(calls) != 1 or not _has_plain_rows(*calls[0][1]):
        raise ConfigError(
            f"the output layer of the draft {config.model!r} cannot be trimmed, as it is quantized "
            'or more than one matrix: leave "draft_vocabulary" out, or give "model" another draft'
        )
    [(processor, (layer, *_))] = calls
    trimmed = _with_rows(layer, rows)
    processor.org_vocab_size = len(rows)
    processor.register_forward_pre_hook(lambda _, args: (trimmed, *args[1:]))


def _has_plain_rows(layer: Any, states: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a logits processor that is called so multiplies with a matrix, and no more."""
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    return bias is None and isinstance(layer.quant_method, plain) and layer.weight.dim() == 2


def _with_rows(layer: Any, rows: Tensor) -> ParallelLMHead:
    """A layer of its own with these rows of another one, over the same ranks."""
    shard = layer.shard_indices
    own = rows - shard.org_vocab_start_index
    is_here = (own >= 0) & (own < shard.num_org_elements)
    weight = layer.weight.new_zeros(len(rows), layer.weight.shape[1])
    weight[is_here] = layer.weight.detach()[own[is_here]]
    if layer.tp_size > 1:
        weight = get_tp_group().all_reduce(weight)
    with torch.device(rows.device):
        made = ParallelLMHead(
            *weight.shape, params_dtype=weight.dtype, disable_tp=layer.tp_size == 1
        )
    first, last = made.shard_indices.org_vocab_start_index, made.shard_indices.org_vocab_end_index
    made.weight.data.zero_()  # beyond the last rank's rows there is padding
    made.weight.data[: last - first] = weight[first:last]
    made.quant_method.process_weights_after_loading(made)
    return made
