"""One decision for all ranks of a tensor-parallel group, and what they do if the draft fails.

Every rank gathers the same logits and draws the same noise, so all decide alike. But ranks whose
floats differ once would read different tokens from then on, and the target's layers would mix them
without an error. So what rank 0 drew counts on all ranks: emitted tokens, accepted nodes, drafts.
"""

import logging
import sys
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

logger = logging.getLogger("vllm.sequoia")


def from_rank0(*decided: Tensor) -> tuple[Tensor, ...]:
    """What rank 0 decided, by one broadcast, in the same shapes and dtypes.

    Args:
        decided: Integer tensors ``[R]`` or ``[R, columns]`` of one device.
    """
    if get_tp_group().world_size == 1:
        return decided
    columns = [tensor.reshape(len(tensor), -1) for tensor in decided]
    packed = torch.cat([part.long() for part in columns], dim=1)
    take_from_rank0(packed)
    parts = packed.split([part.shape[1] for part in columns], dim=1)
    return tuple(
        part.reshape(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, decided, strict=True)
    )


def take_from_rank0(tensor: Tensor) -> None:
    """Overwrites a contiguous tensor by rank 0's, in place.

    NCCL is called as for the model's reductions. Where vLLM does not use it so
    (``VLLM_DISABLE_PYNCCL``), torch's process group broadcasts: see `make_communicator`.
    """
    group = get_tp_group()
    nccl = getattr(group.device_communicator, "pynccl_comm", None)
    if nccl is None or nccl.disabled:
        group.broadcast(tensor, src=0)
    elif group.world_size > 1:
        nccl.broadcast(tensor, 0)


def make_communicator(device: torch.device) -> None:
    """Broadcasts once. The first broadcast of torch's process group makes a communicator, whose
    memory must be there when vLLM profiles: it sizes the KV cache by what is left."""
    take_from_rank0(torch.zeros(1, dtype=torch.int64, device=device))


def survive_draft(vllm_config: Any) -> None:
    """Logs that an engine goes on without speculation; called where a draft's error is caught.

    Raises:
        Exception: The same error, where several ranks draft: the others wait for this one.
    """
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        raise
    logger.exception(
        "Sequoia: the draft model failed (%s), and this engine drafts no more: answers stay right, "
        "at the speed of plain vLLM. sequoia:draft_failures counts it; restart the engine to draft",
        repr(sys.exc_info()[1]).splitlines()[0][:200],
    )
