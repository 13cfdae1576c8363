"""Brings what statistics need of a step to the host, without waiting for the device."""

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.kernels.told_branches import BRANCH
from sequoia_vllm.metrics.counts import paths_of
from sequoia_vllm.tree import TokenTree


class PathCopies:
    """Copies of accepted paths under way from device to host; on CPUs they arrive at once."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self._tree, self._on_gpu = tree, device.type == "cuda"
        self._under_way: deque[tuple[Tensor, torch.cuda.Event | None, bool]] = deque()

    def start(self, paths: Tensor, is_dynamic: bool) -> None:
        """Begins to copy one step's trees.

        Args:
            paths: int32 ``[R, 1 + D]``: see `Verified.paths`; not written any more.
            is_dynamic: Whether they have topologies of their own.
        """
        if not self._on_gpu:
            self._under_way.append((paths, None, is_dynamic))
            return
        host = torch.empty_like(paths, device="cpu", pin_memory=True)
        host.copy_(paths, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way.append((host, event, is_dynamic))

    def wait(self) -> None:
        """Waits for the copies under way."""
        for _, event, _ in self._under_way:
            if event is not None:
                event.synchronize()

    def arrived(self) -> list[NDArray[np.int32]]:
        """Takes the paths (see `metrics.paths_of`) of steps whose copies are done, in order."""
        found = []
        while self._under_way:
            paths, event, is_dynamic = self._under_way[0]
            if event is not None and not event.query():
                break
            self._under_way.popleft()
            found.append(_paths_of(self._tree, paths.numpy(), is_dynamic))
        return found


def _paths_of(tree: TokenTree, verified: NDArray[np.int32], is_dynamic: bool) -> NDArray[np.int32]:
    """`paths_of` the trees and branches among ``verified``: see `Verified.paths`."""
    verified = verified[(verified[:, 0] > 1) | (verified[:, 0] == BRANCH)]
    is_branch, accepted = verified[:, 0] == BRANCH, verified[:, 1:].astype(np.int64)
    num_nodes = np.where(is_branch, 0, verified[:, 0])
    accepted[is_branch, 0], accepted[is_branch, 1:] = (accepted[is_branch] >= 0).sum(axis=1), -1
    return paths_of(tree, accepted, num_nodes, is_dynamic)


class DraftingClock:
    """Seconds that a GPU drafts after a step's outcome has left; on CPUs outcomes come later."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start: torch.cuda.Event | None = None
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        """Marks where a step's verification and commit end."""
        self._start = self._mark() if self._on_gpu else None

    def end(self) -> None:
        """Marks where the step's drafting ends."""
        if self._start is not None:
            self._under_way.append((self._start, self._mark()))
            self._start = None

    def ended(self) -> tuple[float, ...] | None:
        """Takes the seconds of steps that have ended on the device, in order; None: a CPU."""
        found = []
        while self._under_way and self._under_way[0][1].query():
            start, end = self._under_way.popleft()
            found.append(start.elapsed_time(end) * 1e-3)
        return tuple(found) if self._on_gpu else None

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
