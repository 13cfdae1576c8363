"""One decision for all ranks of a tensor-parallel group."""

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group


def broadcast_from_rank0(*decided: Tensor) -> tuple[Tensor, ...]:
    """What rank 0 decided: the tokens that a step emits, and the nodes that it accepts.

    Every rank gathers the same logits and draws the same noise, so all decide alike. But ranks
    whose floats differ once would keep different KV caches from then on, and nobody would notice.
    One small broadcast rules that out.

    Args:
        decided: Integer tensors ``[R]`` or ``[R, columns]`` of one device.

    Returns:
        Rank 0's, in the same shapes and dtypes; the arguments where there is one rank.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return decided
    columns = [tensor.reshape(len(tensor), -1) for tensor in decided]
    packed = group.broadcast(torch.cat([part.long() for part in columns], dim=1), src=0)
    parts = packed.split([part.shape[1] for part in columns], dim=1)
    return tuple(
        part.reshape(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, decided, strict=True)
    )
