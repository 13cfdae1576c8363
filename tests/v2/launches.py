"""What a step would launch on a GPU, counted where Triton interprets kernels.

Triton's launches are seen where the interpreter takes them, PyTorch's operators by a
dispatch mode. Views and allocations launch nothing. Copies from the host are counted
where vLLM's helper for them is called, as here host and device are one; other copies
between the two are not seen. Operators on tensors that stay on the host are counted as
if they were on the device.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import sequoia_vllm

GLUE = "glue of ours"
"""What only brings numbers to where something is computed."""
WORK = "kernels of ours"
"""Outside the models: drawing, verification, commit."""
VERIFIER = "vLLM's, called by our verifier"
DRAFT = "draft model"
TARGET = "target model"
OTHERS = "others"

_OURS = str(Path(sequoia_vllm.__file__).parent)
_WORKING = (
    "count_bins_kernel", "lowest_inside_kernel", "row_statistics_kernel", "block_best_kernel",
    "merge_best_kernel", "target_statistics_kernel", "verify_kernel", "commit_kernel",
    "continuations_kernel",
)  # fmt: skip
# What these call is ours, even where it is a function of vLLM's.
_PLACES = re.compile("/(engine/v2|drafting|drafters)/")
_BEFORE_A_FORWARD = ("growth.py", "proposer.py", "draft_batch.py", "reading.py", "scoring.py")
# Allocations, views, and a number that becomes an argument of the kernel that uses it.
_WITHOUT_LAUNCH = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "scalar_tensor")


@dataclass
class Launches:
    """How many there were, by group, place in our code or vLLM's function, and name."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def of(self, *groups: str) -> int:
        return sum(count for (group, _, _), count in self.counts.items() if group in groups)

    def named(self, name: str, *groups: str) -> int:
        return sum(
            count
            for (group, _, found), count in self.counts.items()
            if found == name and group in groups
        )

    def table(self, *groups: str) -> str:
        """In Markdown: group, place, name and number."""
        rows = [("group", "from", "launch", "times"), ("---", "---", "---", "---:")]
        for group in groups:
            mine = sorted((place, name) for kind, place, name in self.counts if kind == group)
            rows += [
                (group, place, name, str(self.counts[group, place, name])) for place, name in mine
            ]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@contextmanager
def counted_launches() -> Iterator[Launches]:
    from triton.runtime.interpreter import GridExecutor

    launches, launch = Launches(), GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _note(launches, self.fn.__name__)
        with _disable_current_modes():  # the interpreter's own work is none of a GPU's
            return launch(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", counted))
        for module in list(sys.modules.values()):  # each imported it by its name
            copy = getattr(module, "__dict__", {}).get("async_tensor_h2d")
            if copy is not None:
                counting = _counting_copies(launches, copy)
                stack.enter_context(patch.object(module, "async_tensor_h2d", counting))
        stack.enter_context(_Operators(launches))
        yield launches


def _counting_copies(launches: Launches, copy: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        _note(launches, "copy from the host")
        with _disable_current_modes():
            return copy(*args, **kwargs)

    return counted


class _Operators(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("vllm", "vllm_ir"):  # in Python: count what it does
            with self:
                keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                return func.redispatch(keys, *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        ):  # made of others; inference mode shows it whole
            with self:
                return func.decompose(*args, **kwargs)
        is_view = any(
            value.alias_info is not None and not value.alias_info.is_write
            for value in func._schema.returns
        )
        if not is_view and not func._opname.startswith(_WITHOUT_LAUNCH):
            _note(self._launches, func._opname)
        return func(*args, **kwargs)


def _note(launches: Launches, name: str) -> None:
    group, place = _group_and_place(name)
    launches.counts[group, place, name] += 1


def _group_and_place(name: str) -> tuple[str, str]:
    """Who launched it, from the stack of calls."""
    frames = [frame for frame in _callers(sys._getframe(2)) if _is_ours(frame) or _is_vllms(frame)]
    ours = [frame for frame in frames if _is_ours(frame) and _PLACES.search(_file(frame))]
    nearest = Path(_file(ours[0])).name if ours else ""
    if any("/vllm/model_executor/" in _file(frame) for frame in frames):
        drafts = any(_file(frame).endswith(_BEFORE_A_FORWARD) for frame in ours)
        return (DRAFT if drafts else TARGET), ""
    if name in _WORKING:
        return WORK, ""
    if nearest in _BEFORE_A_FORWARD or (ours and _is_ours(frames[0])):
        return GLUE, f"{nearest}: {ours[0].f_code.co_name}"
    group = VERIFIER if nearest == "verifier.py" else OTHERS
    return group, frames[0].f_code.co_name if frames else ""


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _is_ours(frame: FrameType) -> bool:
    return _file(frame).startswith(_OURS)


def _is_vllms(frame: FrameType) -> bool:
    return "/site-packages/vllm/" in _file(frame)
