"""What of vLLM needs a real GPU or the GPU build, and what stands in its place."""

from __future__ import annotations

import functools
import inspect
import os
import textwrap
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gpu_stand_in import experts, flash_attention, graphs, runtime, sleeping

QUICK_START = "REHEARSE_QUICK_START"


class _Torch(types.ModuleType):
    """torch, but for what it takes for a device of some name; for one module of vLLM."""

    def __init__(self, device: Any) -> None:
        super().__init__("torch")
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, _: str) -> Any:
        return self._device


class UvaBuffer:
    """Host memory that the device reads in place."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        with _disable_current_modes():  # of allocators of the device's memory, too
            self.cpu = torch.zeros(size, dtype=dtype, pin_memory=True)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> Tensor:
        """The device's view of its first ``n`` elements."""
        return self.cpu if n is None else self.cpu[:n]


def async_tensor_h2d(
    data: Any, device: Any = None, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Copies like vLLM's, from memory that the host may use again. Not within a graph."""
    graphs.refuse_while_capturing("a copy of host memory that will be gone")
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    if isinstance(data, Tensor):
        copy = data.to(dtype=dtype or data.dtype, copy=True)
    else:
        copy = torch.tensor(data, dtype=dtype or (out.dtype if out is not None else None))
    return copy if out is None else out.copy_(copy)


def _once_made(owner: type, change: Callable[[Any], object]) -> None:
    """Changes each object of a class as soon as it is made."""
    start = owner.__init__

    @functools.wraps(start)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        change(self)

    owner.__init__ = make


@functools.cache
def install() -> None:
    """Replaces the names, once: vLLM's plugins may be loaded again."""
    _replace_copies()
    _import_passes_as_on_cpus()
    _replace_operators()
    _count_on_the_host()
    _change_the_worker()
    _embed_without_the_fused_operator()
    _loosen_attention()
    _offload_as_on_gpus()
    _change_the_plugin()
    _check_memory()
    _watch_copies()
    sleeping.install()
    _start_quickly_where_asked()


def _replace_copies() -> None:
    import vllm.utils.torch_utils as utilities
    import vllm.v1.worker.gpu.buffer_utils as buffers

    utilities.async_tensor_h2d = async_tensor_h2d
    # It kept the function of whichever of the two modules was imported first.
    utilities.prev_set_stream = runtime.set_stream
    torch.cuda.set_stream = utilities._patched_set_stream
    utilities.weak_ref_tensor = lambda tensor: tensor
    buffers.UvaBuffer = UvaBuffer
    buffers.is_uva_available = lambda: True


def _import_passes_as_on_cpus() -> None:
    """Fusion passes name operators of the GPU build when they are imported."""
    from gpu_stand_in.platform import StandInPlatform as Platform

    Platform.is_cuda_alike = Platform.is_cuda = lambda self=None: False
    try:
        import vllm.compilation.passes.pass_manager  # noqa: F401
    finally:
        del Platform.is_cuda_alike, Platform.is_cuda


def _replace_operators() -> None:
    import vllm._custom_ops as operators
    import vllm.kernels.vllm_c  # noqa: F401 (registers operators)
    from vllm import ir

    norm = ir.ops.rms_norm.impls["vllm_c"]
    supports = norm.supports_args
    # The CPU's takes rows of a view for neighbours, as those of keys beside queries are not.
    norm.supports_args = lambda x, *args, **options: (
        x.is_contiguous() and supports(x, *args, **options)
    )
    operators.reshape_and_cache_flash = flash_attention.reshape_and_cache_flash
    operators.scaled_fp8_quant = lambda values, scale, **_: (
        flash_attention.quantized(values, scale), scale,
    )  # fmt: skip
    operators.topk_softmax = experts.topk_softmax
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    TritonExperts.apply = experts.apply


def _count_on_the_host() -> None:
    """Replicas' numbers of tokens are the host's, which no graph holds, and nothing waits for."""
    from vllm import forward_context

    on_host = _disable_current_modes()
    forward_context.DPMetadata.make = staticmethod(on_host(forward_context.DPMetadata.make))
    forward_context._compute_sp_num_tokens = on_host(forward_context._compute_sp_num_tokens)


def _change_the_worker() -> None:
    import vllm.v1.worker.gpu_worker as worker

    worker.torch = _Torch(torch.device("cpu"))  # whatever "cuda:0" is
    worker.kernel_warmup = lambda _: None  # of kernels that only the GPU build has
    init_device = worker.Worker.init_device

    def init_device_as_cuda(self: Any) -> Any:
        runtime.forget_memory()
        self.device_config.device_type = "cuda"
        try:
            return init_device(self)
        finally:
            self.device_config.device_type = "cpu"

    worker.Worker.init_device = init_device_as_cuda


def _embed_without_the_fused_operator() -> None:
    """With several ranks vLLM takes one that only the GPU build has."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    _once_made(VocabParallelEmbedding, lambda one: setattr(one, "use_fused_embedding", False))


def _loosen_attention() -> None:
    """float32 in FlashAttention, for tests of identity; no splits, which cost programs."""
    from vllm.triton_utils import tl
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    FlashAttentionBackend.supported_dtypes.append(torch.float32)
    triton_attn.MIN_LAUNCH_GRID_SIZE_2D = 0
    tl.debug_barrier = lambda *_, **__: None


def _offload_as_on_gpus() -> None:
    """vLLM's offloaders, which leave alone what lies on a CPU, take it for the device's."""
    from vllm.model_executor.offloader import prefetch, uva

    prefetch.torch = uva.torch = _Torch(object())  # nothing is on "cpu"
    offload = uva.UVAOffloader._maybe_offload_to_cpu
    source, condition = inspect.getsource(offload), 'p.device.type == "cpu" or '
    assert source.count(condition) == 1
    exec(textwrap.dedent(source).replace(condition, ""), vars(uva))
    uva.UVAOffloader._maybe_offload_to_cpu = vars(uva).pop(offload.__name__)
    uva.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    _once_made(prefetch.PrefetchOffloader, lambda one: one.copy_stream.make_late())


def _change_the_plugin() -> None:
    """The plugin asks where a tensor lies in one place: the answer is the GPU's."""
    from sequoia_vllm.engine.v2.path_copies import PathCopies

    _once_made(PathCopies, lambda one: setattr(one, "_on_gpu", True))


def _check_memory() -> None:
    """Every access of our interpreted kernels."""
    from tests.support.memory_checks import MemoryChecks, install, wanted

    if wanted():
        install(MemoryChecks())


def _watch_copies() -> None:
    """Host memory that a copy reads or writes, or that the device reads in place."""
    import vllm.v1.worker.gpu_worker as worker
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor, UvaBufferPool
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from tests.gpu_rehearsal.host_copies import watch_pools

    copies = runtime.copies
    watch_pools(UvaBufferPool, copies)
    # A new one is handed out before the device has anything to read it for.
    UvaBackedTensor.__init__ = copies.buffers_unwatched()(UvaBackedTensor.__init__)
    # vLLM's profiling and its warm-up run steps without a wait, and look at no result.
    worker.warmup_kernels = copies.buffers_unwatched()(worker.warmup_kernels)
    GPUModelRunner.profile_run = copies.buffers_unwatched()(GPUModelRunner.profile_run)
    execute_model = GPUModelRunner.execute_model

    def watched(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # The rank whose outputs the engine takes alone waits, and for the others.
        if get_tensor_model_parallel_rank() > 0 or not get_pp_group().is_last_rank:
            copies.watches_buffers = False
        is_idle = scheduler_output.total_num_scheduled_tokens == 0  # the device reads nothing
        with copies.buffers_unwatched() if is_idle else nullcontext():
            return execute_model(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = watched


def _start_quickly_where_asked() -> None:
    """Leaves out two parts of an engine's start where the environment has `QUICK_START`.

    Both take long to interpret: graphs that are captured on trial, to estimate their memory,
    and steps that compile kernels before the first request.
    """
    import vllm.v1.worker.gpu_worker as worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def skippable(function: Callable[..., Any], instead: Any = None) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return instead if QUICK_START in os.environ else function(*args, **kwargs)

        return call

    worker.warmup_kernels = skippable(worker.warmup_kernels)
    estimate = skippable(GPUModelRunner.profile_cudagraph_memory, instead=0)
    GPUModelRunner.profile_cudagraph_memory = estimate
