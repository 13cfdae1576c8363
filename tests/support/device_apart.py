"""Tensors on a device of their own, so that hidden waits and mixed devices show.

A `DeviceTensor` says it is on ``cuda:0`` and keeps its values in a CPU tensor. What its
operators do is done there; but the host may not look at its values (``.item()``,
``.tolist()``, ``.numpy()``, ``bool()``, boolean masks as indices, whatever makes a GPU's
host wait), and no operator or kernel takes it together with a host tensor, other than
copies and single numbers, as on GPUs. Within `device_apart` factories and ``.to`` make
such tensors where they are asked for a cuda device, and interpreted Triton kernels take
them, and nothing else.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("cuda", 0)

aten = torch.ops.aten
_WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
    aten.equal.default, aten.is_nonzero.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default,
}  # fmt: skip


_may_wait = False


class DeviceApartError(RuntimeError):
    """Something that a GPU refuses, or makes the host wait for."""


def _waits(what: str) -> None:
    if not _may_wait:
        raise DeviceApartError(f"{what} waits for the device")


@contextmanager
def setting_up() -> Iterator[None]:
    """The host may wait for the device: buffers are made and filled. Mixing stays an error."""
    global _may_wait
    before, _may_wait = _may_wait, True
    try:
        yield
    finally:
        _may_wait = before


class DeviceTensor(Tensor):
    """A tensor on `DEVICE`; ``memory`` is the CPU tensor that holds it."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            # torch's own code would look for a driver: only Python hears of `DEVICE`.
            device=memory.device,
        )
        made.memory = memory
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise DeviceApartError("numpy() of a device tensor")

    def tolist(self) -> Any:
        _waits("tolist()")
        return self.memory.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        _refuse_waits(function, args, kwargs)
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if function is aten.copy_.default:
            _refuse_waiting_copy(args, kwargs)
        else:
            _refuse_host_tensors(function, tensors)
        owners = {id(tensor.memory): tensor for tensor in tensors if isinstance(tensor, cls)}
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.memory, (args, kwargs))
        made = function(*args, **kwargs)
        hosts = {id(tensor) for tensor in tensors}  # `host.copy_(device)` returns host

        def wrapped(tensor: Tensor) -> Tensor:
            if id(tensor) in hosts:
                return tensor
            owner = owners.get(id(tensor))
            return cls(tensor) if owner is None else owner

        return tree_map_only(Tensor, wrapped, made)


def _refuse_waits(function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if function in _WAITS:
        _waits(f"{function}")
    if function is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        _waits(f"{function} without output_size")
    if function in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        masked = any(index is not None and index.dtype == torch.bool for index in args[1])
        one_value = function is not aten.index.Tensor and args[2].numel() == 1
        if masked and not one_value:  # one value is filled in, without counting the places
            _waits(f"{function} with a boolean mask")


def _refuse_waiting_copy(args: Any, kwargs: dict[str, Any]) -> None:
    target, source = args[:2]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    to_device = isinstance(target, DeviceTensor)
    is_number = to_device and source.dim() == 0  # becomes an argument of a kernel
    if to_device != isinstance(source, DeviceTensor) and not is_number and not non_blocking:
        _waits("copy_ between host and device, not non_blocking,")


def _refuse_host_tensors(function: Any, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0:
            raise DeviceApartError(
                f"{function} takes a host tensor {list(tensor.shape)} beside one on the device"
            )


class _OnDevice(TorchFunctionMode):
    """Makes device tensors where a cuda device is asked for, and host tensors of them."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("to", "cuda", "cpu") and isinstance(args[0], Tensor):
            return _move(name, function, args, kwargs)
        if kwargs.get("device") is None:
            return function(*args, **kwargs)
        on_host = torch.device(kwargs["device"]).type != "cuda"
        if name in ("tensor", "as_tensor") and not on_host:
            _waits(f"torch.{name} of host values on the device")
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        # Of a "like" only the shape is looked at.
        args = tree_map_only(DeviceTensor, lambda tensor: tensor.memory, args)
        made = function(*args, **kwargs)
        return made if on_host else DeviceTensor(made)


def _move(name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """``to``, ``cuda`` and ``cpu`` of a tensor, between the devices."""
    source, given = args[0], [*args[1:], *kwargs.values()]
    places = [torch.device(p) for p in given if isinstance(p, torch.device | str)]
    if name != "to":
        places = [torch.device(name)]
    is_on_device = isinstance(source, DeviceTensor)
    if not places or (places[0].type == "cuda") == is_on_device:
        args = tuple(arg for arg in args if not isinstance(arg, torch.device | str))
        kwargs.pop("device", None)
        if name == "to" and (len(args) > 1 or set(kwargs) - {"non_blocking", "copy"}):
            return function(*args, **kwargs)
        return source.clone() if kwargs.get("copy") else source
    if not kwargs.get("non_blocking", False):
        _waits(f"{name}() between host and device, not non_blocking,")
    dtypes = [value for value in given if isinstance(value, torch.dtype)]
    values = source.memory if is_on_device else source
    moved = values.to(dtypes[0] if dtypes else values.dtype, copy=True)
    return moved if is_on_device else DeviceTensor(moved)


def on_device(tensor: Tensor) -> DeviceTensor:
    """The tensor, with the same memory, as one on the device; for tests to set things up."""
    return tensor if isinstance(tensor, DeviceTensor) else DeviceTensor(tensor)


@contextmanager
def device_apart() -> Iterator[None]:
    """Device tensors are made, and taken by kernels, for as long as the context lasts."""
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__

    @functools.wraps(original)
    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
                raise DeviceApartError(
                    f"{self.fn.__name__} is given a host tensor {list(value.shape)}"
                )
        args, kwargs = tree_map_only(DeviceTensor, lambda t: t.memory, (args, kwargs))
        with torch._C.DisableTorchFunction():
            original(self, *args, **kwargs)

    GridExecutor.__call__ = launch
    try:
        with _OnDevice():
            yield
    finally:
        GridExecutor.__call__ = original
