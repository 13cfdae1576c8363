"""CUDA graphs in software: a record of operators and kernel launches, run again on replay.

As on a GPU, a replay runs no Python of the model or the plugin; what a graph reads are
the addresses that it saw, and the numbers that the host knew, when it was captured;
capturing runs nothing (what it wrote outside the graph's own memory is put back); and
graphs of one pool share that memory: whatever one leaves there, another destroys.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import sys
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# Operators that wait for the device, to answer the host.
_WAITING = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default,
    _aten.equal.default, _aten.is_nonzero.default, _aten.item.default, _aten._unique2.default,
}  # fmt: skip
# Operators that only allocate: on replay the memory is what it happens to be.
_ALLOCATING = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip
# vLLM's operators in Python: what they do belongs into the record, not that they are called.
_PYTHON_NAMESPACES = ("vllm", "vllm_ir")
# Reductions over ranks: in place, though their schemas do not say so.
_COLLECTIVES = "c10d"
_POISON = -77

captured: Counter[str] = Counter()
"""Graphs by kind: the name of the class that captured them."""
replayed: Counter[str] = Counter()
"""Replays by kind."""

_capturing: CUDAGraph | None = None


class CaptureError(RuntimeError):
    """What the CUDA runtime would refuse while a stream is capturing."""


def capturing() -> CUDAGraph | None:
    return _capturing


def refuse_while_capturing(what: str) -> None:
    if _capturing is not None:
        raise CaptureError(f"operation not permitted when stream is capturing: {what}")


def report() -> dict[str, dict[str, int]]:
    return {"captured": dict(captured), "replayed": dict(replayed)}


def _write_report() -> None:
    """For tests that run engines in other processes, which may be killed at their end."""
    if path := os.environ.get("GPU_STAND_IN_REPORT"):
        Path(f"{path}.{os.getpid()}").write_text(json.dumps(report()))


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """All of the storage of `tensor`."""
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())


def _writes(function: Any) -> bool:
    """Whether an operator writes memory that it was given."""
    return function._schema.is_mutable or function.namespace == _COLLECTIVES


@dataclass(frozen=True)
class _Operator:
    """One of torch's operators; `made` are the tensors for which it allocated memory."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, Tensor]]

    def __call__(self) -> None:
        if self.function in _ALLOCATING:
            return
        result = self.function(*self.args, **self.kwargs)
        if self.function.namespace == _COLLECTIVES:  # which come with a handle to wait for
            result[-1].wait()
        results = tensors_in(result)
        for index, tensor in self.made:
            if address_of(tensor) != address_of(results[index]):
                tensor.copy_(results[index])


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.namespace in _PYTHON_NAMESPACES:
            cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            with self:
                return function.redispatch(cpu, *args, **kwargs)
        if function in _WAITING:
            refuse_while_capturing(str(function))
        if function is _aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            refuse_while_capturing("an index that is a boolean mask")
        if _writes(function):
            self._graph.before_write(tensors_in((args, kwargs)))
        result = function(*args, **kwargs)
        if function in _ALLOCATING:  # no kernel fills it now, and operators may index by it
            with _disable_current_modes():
                result.zero_()
        self._graph.note_operator(function, args, kwargs, result)
        return result


class CUDAGraph:
    """Replaces `torch.cuda.CUDAGraph`.

    Attributes:
        kind: Name of the class that captured it.
    """

    def __init__(self) -> None:
        self.kind, self._pool = "", None
        # What a capture wrote elsewhere, as it was before: (memory, copy).
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        # What a replay calls: operators, and kernels, Triton's or a library's.
        self._record: list[Callable[[], object]] = []
        # Memory that only this graph and others of its pool know, by address.
        self._private: dict[int, Tensor] = {}
        self._is_captured = self._is_poisoned = False

    # -- capture -----------------------------------------------------------------------

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        global _capturing
        assert _capturing is None, "a capture within a capture"
        assert not self._is_captured
        self._pool = pool
        self.kind = _capturing_class()
        # vLLM cuts a model before it is captured, or while it is.
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

        self.is_piece = self.kind == PIECE or BreakableCUDAGraphCapture.is_active()
        _graphs_by_pool[pool].add(self)
        _capturing = self
        self._recorder = _Recorder(self)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self.stop_recording()
        for memory, copy in self._before.values():
            memory.copy_(copy)
        self._before = {}
        self._is_captured = True
        captured[self.kind] += 1
        self._poison()

    def stop_recording(self) -> None:
        global _capturing
        self._recorder.__exit__(None, None, None)
        _capturing = None

    def before_write(self, tensors: list[Tensor]) -> None:
        """Keeps what is there, of memory that is not the graph's own."""
        for tensor in tensors:
            address = address_of(tensor)
            if address and address not in self._private and address not in self._before:
                with _disable_current_modes():
                    memory = _whole(tensor, torch.uint8)
                    self._before[address] = memory, memory.clone()

    def note_operator(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        given = {address_of(tensor) for tensor in tensors_in((args, kwargs))}
        made = [
            (index, tensor)
            for index, tensor in enumerate(tensors_in(result))
            if address_of(tensor) and address_of(tensor) not in given
        ]
        for _, tensor in made:
            self._private.setdefault(address_of(tensor), tensor)
        # Others are views: what they show is written by operators before and after.
        if _writes(function) or made:
            self._record.append(_Operator(function, args, kwargs, made))

    def note_launch(self, run: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Records the launch of a kernel, which runs nothing now."""
        self._record.append(functools.partial(run, *args, **kwargs))

    # -- replay ------------------------------------------------------------------------

    @torch.inference_mode()
    def replay(self) -> None:
        assert self._is_captured
        assert _capturing is None
        replayed[self.kind] += 1
        _write_report()
        # The pieces of a model hand each other their results, in memory of one pool.
        pieces = self.is_piece
        for other in _graphs_by_pool[self._pool]:
            if other is self or not (pieces and other.is_piece):
                other._poison()
        self._is_poisoned = False
        for entry in self._record:
            entry()

    def _poison(self) -> None:
        """Destroys what the last replay left in private memory, once."""
        if self._is_poisoned:
            return
        self._is_poisoned = True
        for tensor in self._private.values():
            memory = _whole(tensor, tensor.dtype)
            if tensor.dtype.is_floating_point:
                memory.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                memory.fill_(_POISON)

    def pool(self) -> Any:
        return self._pool


PIECE = "CUDAGraphWrapper"
"""Kind of the graphs of a model that is cut at its attention layers."""

_graphs_by_pool: dict[Any, weakref.WeakSet[CUDAGraph]] = defaultdict(weakref.WeakSet)


def _capturing_class() -> str:
    """Which of vLLM's classes, or of those derived from them, captures now."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    for frame, _ in traceback.walk_stack(sys._getframe()):
        owner = frame.f_locals.get("self")
        if isinstance(owner, CUDAGraphWrapper | CudaGraphManager):
            return type(owner).__name__
    return "unknown"


def vllm_captures() -> bool:
    """Whether vLLM captures graphs now, or runs what it captures next, with made-up batches."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    capture = inspect.unwrap(CudaGraphManager.capture).__code__
    return any(frame.f_code is capture for frame, _ in traceback.walk_stack(sys._getframe()))


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None,
    capture_error_mode: str = "global", **_: Any,
) -> Iterator[None]:  # fmt: skip
    """Replaces `torch.cuda.graph`."""
    torch.cuda.synchronize()
    gc.collect(0)
    cuda_graph.capture_begin(pool)
    try:
        yield
    except BaseException:
        cuda_graph.stop_recording()
        raise
    cuda_graph.capture_end()


graph.default_capture_stream = None


# -- kernels -------------------------------------------------------------------------------------


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` stands for a library's kernel, which returns its argument `out`, if it has one.

    A graph has it as one entry.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _capturing is None:
            return function(*args, **kwargs)
        _capturing.note_launch(function, args, kwargs)
        return inspect.getcallargs(function, *args, **kwargs).get("out")

    return call


def _freeze_grid(executor: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """The grid is what it is now, also where it is computed from the arguments."""
    if callable(executor.grid):
        named = {name: value for name, value in kwargs.items() if name in executor.arg_names}
        executor.grid = tuple(executor.grid(inspect.getcallargs(executor.fn, *args, **named)))


def hook_triton() -> None:
    """Interpreted launches are recorded while a graph is captured."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    @functools.wraps(launch)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _capturing is None:
            return launch(self, *args, **kwargs)
        with _disable_current_modes():
            _freeze_grid(self, args, kwargs)
        _capturing.note_launch(functools.partial(launch, self), args, kwargs)
        return None

    GridExecutor.__call__ = call
