"""The target's hidden states of a step, gathered for a head."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.engine.v2.drafting.drafter import HeadDrafter
from sequoia_vllm.engine.v2.drafting.image_rows import ImageRows
from sequoia_vllm.kernels.target_states import gather_target_states


class TargetStates:
    """Gathers the states that a head reads with the committed tokens.

    A step leaves the target's states (of some layers, or the last ones) at all nodes. One launch
    gathers the accepted path's before the head reads. The states do not outlive the step, so the
    head reads in every step.

    Attributes:
        gathered: ``[rows, W]``: a buffer that stays in place; states of all layers side by side.

    Args:
        head: Says which states it reads.
        rows: Rows of the largest pass that reads them in their place.
        batch: What each request reads.
    """

    def __init__(
        self, head: HeadDrafter, target_model: torch.nn.Module, rows: int, batch: DraftBatch
    ) -> None:
        self._head, self._batch = head, batch
        width = head.chains.vllm_config.model_config.get_hidden_size()
        self.gathered = torch.zeros(
            rows, head.layers_read(target_model) * width, dtype=head.chains.dtype,
            device=head.chains.device,
        )  # fmt: skip
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

    def note_images(self, batch: InputBatch, mm_inputs: Any) -> None:
        """Gives the head the embeddings of a step's images, see `ImageRows.of`."""
        self._head.images = ImageRows.of(mm_inputs, batch, self._batch)

    def forget(self) -> None:
        """Frees the step's states and images for the next step."""
        self._layers, self._head.images = [], None

    def gather(self, first_rows: Tensor, rows: int) -> Tensor:
        """``[rows, W]``: the states of what each request reads: in place if they fit.

        Args:
            first_rows: int32 ``[R + 1]``, see `DraftBatch`.
            rows: Rows to fill in, padding included.
        """
        states = self.gathered[:rows]
        if len(states) < rows:
            states = self.gathered.new_empty(rows, self.gathered.shape[1])
        gather_target_states(
            self._layers,
            query_start_loc=self._first_rows,
            accepted=self._accepted,
            first_rows=first_rows,
            states=states,
        )
        return states

    def dummy(self, rows: int) -> Tensor:
        """``[rows, F]``: what the head reads in a dummy run."""
        zeros = self.gathered.new_zeros(rows, self.gathered.shape[1])
        return self._head.combine_hidden_states(zeros)
