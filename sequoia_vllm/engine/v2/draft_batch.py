"""The buffers that a drafting pass reads: they stay where they are, so CUDA graphs may."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_vllm.engine.v2.reading import ReadRows
from sequoia_vllm.kernels.modes import SKIP


class DraftBatch:
    """The requests of a drafting pass, in batch order.

    Attributes:
        slots: int64 ``[max_num_reqs]``: request slot; -1 beyond the batch.
        starts: int32: first token that the draft has yet to read.
        counts: int32: how many it reads in this pass.
        roots: int32: position of the last committed token.
        modes: int32: see `kernels.modes`; SKIP beyond the batch.
        temperature: float32.
        seeds: int64.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        def buffer(dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full((max_num_reqs,), value, dtype=dtype, device=device)

        self.slots = buffer(torch.int64, -1)
        self._lengths = torch.zeros(3, max_num_reqs, dtype=torch.int32, device=device)
        self.starts, self.counts, self.roots = self._lengths
        self.modes = buffer(torch.int32, SKIP)
        self.temperature = buffer(torch.float32)
        self.seeds = buffer(torch.int64)

    def fill(
        self, slots: Tensor, unread: ReadRows, modes: Tensor, temperature: Tensor, seeds: Tensor
    ) -> None:
        """Takes one batch.

        Args:
            slots: int64 ``[R]``.
            unread: What the draft reads of each.
            modes, temperature, seeds: Of all request slots.
        """
        num_reqs = len(slots)
        self.slots[num_reqs:] = -1
        self.modes[num_reqs:] = SKIP
        self._lengths[:, num_reqs:] = 0  # a graph's padding attends to no context
        for buffer, values in (
            (self.slots, slots),
            (self.starts, unread.starts),
            (self.counts, unread.counts),
            (self.roots, (unread.ends - 1).clamp_(min=0)),
            (self.modes, modes[slots]),
            (self.temperature, temperature[slots]),
            (self.seeds, seeds[slots]),
        ):
            buffer[:num_reqs] = values
