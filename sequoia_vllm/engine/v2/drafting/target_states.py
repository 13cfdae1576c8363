"""The target's hidden states of a step, gathered for a head."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.engine.v2.drafting.drafter import HeadDrafter
from sequoia_vllm.kernels.target_states import gather_target_states


class TargetStates:
    """Gathers the states that a head reads with the committed tokens.

    A step leaves the target's states (of some layers, or the last ones) at all nodes. One launch
    gathers the accepted path's before the head reads. The states do not outlive the step, so the
    head reads in every step.

    Attributes:
        gathered: ``[rows, W]``: a buffer that stays in place, for passes with equally many rows
            per request; states of all layers side by side.

    Args:
        head: Says which states it reads.
        target_model: The target.
        rows: Rows of the largest such pass.
    """

    def __init__(self, head: HeadDrafter, target_model: torch.nn.Module, rows: int) -> None:
        self._head = head
        width = head.chains.vllm_config.model_config.get_hidden_size()
        self.gathered = torch.zeros(
            rows, head.layers_read(target_model) * width, dtype=head.chains.dtype,
            device=head.chains.device,
        )  # fmt: skip
        self._rows_of: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers: list[Tensor] = []

    def note(
        self,
        batch: InputBatch,
        last: Tensor,
        auxiliary: list[Tensor] | None,
        accepted: Tensor | None,
    ) -> None:
        """Notes a step's states ``[T, H]``, and `TreeProposerV2.accepted`."""
        self._layers, self._accepted = self._head.states_read(last, auxiliary), accepted
        self._first_rows = batch.query_start_loc[: batch.num_reqs + 1]

    def forget(self) -> None:
        """Frees the step's states for the next step."""
        self._layers = []

    def gather_uniform(self, num_reqs: int, width: int) -> None:
        """Gathers the states of ``width`` tokens of each request into `gathered`."""
        if width not in self._rows_of:
            every = torch.arange(len(self.gathered), dtype=torch.int32, device=self.gathered.device)
            # Same dtypes as ragged rows, so that the kernel is compiled once.
            self._rows_of[width] = (every // width).long(), every % width
        rows = num_reqs * width
        requests, offsets = self._rows_of[width]
        self._gather(requests[:rows], offsets[:rows], self.gathered[:rows])

    def gather(self, requests: Tensor, offsets: Tensor) -> Tensor:
        """``[rows, F]``: what the head reads at these rows, see `RaggedRows`."""
        states = self.gathered.new_empty(len(requests), self.gathered.shape[1])
        self._gather(requests, offsets, states)
        return self._head.combine_hidden_states(states)

    def dummy(self, rows: int) -> Tensor:
        """``[rows, F]``: what the head reads in a dummy run."""
        zeros = self.gathered.new_zeros(rows, self.gathered.shape[1])
        return self._head.combine_hidden_states(zeros)

    def _gather(self, requests: Tensor, offsets: Tensor, states: Tensor) -> None:
        gather_target_states(
            self._layers,
            query_start_loc=self._first_rows,
            accepted=self._accepted,
            requests=requests,
            offsets=offsets,
            states=states,
        )
