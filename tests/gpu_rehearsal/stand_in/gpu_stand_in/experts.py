"""The GPU build's operators for mixtures of experts, in torch: to a graph they are kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from gpu_stand_in import graphs

_NO_EXPERT = -1


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


_ACTIVATIONS = {"silu": _gated, "relu2_no_mul": lambda rows: relu(rows).square()}


@graphs.device_function
def topk_softmax(
    topk_weights: Tensor, topk_ids: Tensor, token_expert_indices: Tensor, gating_output: Tensor,
    renormalize: bool = False, e_score_correction_bias: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> None:  # fmt: skip
    """The experts of each row, with vLLM's parameters; rows of padding have none."""
    scores = gating_output.float().softmax(-1)
    ranked = scores if e_score_correction_bias is None else scores + e_score_correction_bias
    ids = ranked.topk(topk_ids.shape[1]).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights /= weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_ids.copy_(ids)
    if is_padding is not None:
        topk_ids.masked_fill_(is_padding[:, None], _NO_EXPERT)


@graphs.device_function
def apply(
    self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor,
    topk_weights: Tensor, topk_ids: Tensor, activation: Any, global_num_experts: int,
    expert_map: Tensor | None, a1q_scale: Tensor | None, a2_scale: Tensor | None,
    workspace13: Tensor, workspace2: Tensor, expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:  # fmt: skip
    """Writes the weighted sum of each row's experts; `expert_map` says which are this rank's.

    Replaces that of vLLM's `TritonExperts`, which sorts rows by expert in an operator.
    """
    activated = _ACTIVATIONS[activation.value]
    if apply_router_weight_on_input:  # of Llama 4: inputs have been multiplied
        topk_weights = torch.ones_like(topk_weights)
    assert (a1q_scale, a2_scale) == (None, None)
    ids = topk_ids
    assert int(ids.min()) >= _NO_EXPERT, "rows that nobody routed"
    if expert_map is not None:
        here = torch.full_like(ids, _NO_EXPERT)
        routed = ids != _NO_EXPERT
        here[routed] = expert_map[ids[routed].long()].to(ids.dtype)
        ids = here
    output.zero_()
    for expert in range(len(w1)):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        found = activated(hidden_states[rows] @ w1[expert].T) @ w2[expert].T
        output.index_add_(0, rows, found * topk_weights[rows, places, None].to(found.dtype))
