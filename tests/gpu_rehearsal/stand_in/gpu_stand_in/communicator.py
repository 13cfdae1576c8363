"""vLLM's communicator of CUDA devices without NCCL: torch's own operations, over gloo."""

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


class GlooCommunicator(CudaCommunicator):
    """CUDA's by name, since vLLM asks for it when it captures; all it does is the base class's."""

    ca_comm = fi_pcie_ipc_ar_comm = None

    __init__ = DeviceCommunicatorBase.__init__
    all_reduce = DeviceCommunicatorBase.all_reduce
    all_gather = DeviceCommunicatorBase.all_gather
    reduce_scatter = DeviceCommunicatorBase.reduce_scatter
    broadcast = DeviceCommunicatorBase.broadcast
    send = DeviceCommunicatorBase.send
    recv = DeviceCommunicatorBase.recv
    destroy = DeviceCommunicatorBase.destroy
