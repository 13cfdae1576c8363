"""vLLM's communicator of CUDA devices without NCCL: torch's own operations, over gloo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


class GlooCommunicator(CudaCommunicator):
    """CUDA's by name, since vLLM asks for it when it captures; what it does is the base class's.

    But for the rows that replicas of a mixture of experts exchange: each may have another
    number of them.
    """

    ca_comm = fi_pcie_ipc_ar_comm = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        DeviceCommunicatorBase.__init__(self, *args, **kwargs)
        if self.use_all2all:
            assert self.all2all_backend == "allgather_reducescatter"
            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    all_reduce = DeviceCommunicatorBase.all_reduce
    all_gather = DeviceCommunicatorBase.all_gather
    reduce_scatter = DeviceCommunicatorBase.reduce_scatter
    broadcast = DeviceCommunicatorBase.broadcast
    send = DeviceCommunicatorBase.send
    recv = DeviceCommunicatorBase.recv
    destroy = DeviceCommunicatorBase.destroy

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        """The rows of all ranks, of which each has `sizes` of its own."""
        assert dim == 0
        if isinstance(input_, list):
            return [self._gathered_rows(tensor, sizes) for tensor in input_]
        return self._gathered_rows(input_, sizes)

    def _gathered_rows(self, rows: Tensor, sizes: list[int] | None) -> Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return self.all_gather(rows, 0)
        assert sizes[self.rank_in_group] == len(rows)
        most = max(sizes)
        padded = pad(rows, (0, 0, 0, most - len(rows)))
        parts = self.all_gather(padded, 0).split(most)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        """This rank's rows of all ranks' sum."""
        assert dim == 0
        if sizes is None:
            sizes = [len(input_) // self.world_size] * self.world_size
        summed = self.all_reduce(input_.clone())
        return summed.split(sizes)[self.rank_in_group].clone()

    def reduce_scatterv_into_output(
        self, input_: Tensor, output: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        return output.copy_(self.reduce_scatterv(input_, dim, sizes))

    def get_symmetric_memory_buffer(self, *_: Any) -> None:
        """None: that is NCCL's."""
