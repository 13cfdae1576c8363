"""The target's hidden states of a step, gathered for a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.engine.v2.drafting.drafter import HeadDrafter
from sequoia_vllm.kernels.draft_inputs import gather_target_states


@dataclass(frozen=True)
class ImageRows:
    """Embeddings of a step's images, and which of the tokens that a head reads they belong to.

    vLLM counts a token by its row in the target's pass, which has one for each node. The head's
    pass has rows for accepted nodes only, which only the device knows.

    """

    embeddings: Tensor  # ``[m, H]``
    requests: Tensor  # int64 ``[m]``: the batch's request that each belongs to
    places: Tensor  # int64 ``[m]``: its place among the tokens that the request reads
    batch: DraftBatch  # what each request reads

    @classmethod
    def of(cls, mm_inputs: Any, batch: InputBatch, reads: DraftBatch) -> ImageRows | None:
        """Takes what vLLM gives `propose`; None: the step reads no image.

        Args:
            mm_inputs: Embeddings ``[k, H]`` of each image, and bool ``[T]`` on the host: which rows
                of the target's pass, each for the token behind its own, have one. None: nothing.
            reads: What the head reads of each request.
        """
        if mm_inputs is None or not mm_inputs[0]:
            return None
        images, has_one = mm_inputs
        rows, starts = np.flatnonzero(has_one.numpy()), batch.query_start_loc_np[: batch.num_reqs]
        requests = np.searchsorted(starts, rows, side="right") - 1
        places = np.stack([requests, rows - starts[requests]]).astype(np.int64)
        of_requests, of_places = async_tensor_h2d(places, device=images[0].device)
        return cls(torch.cat(images), of_requests, of_places, reads)

    def placed(self, embedded: Tensor) -> Tensor:
        """``[rows, H]``: the tokens' embeddings, with images' in the places that the head reads."""
        first_rows, counts = self.batch.first_rows[self.requests], self.batch.counts[self.requests]
        rows = torch.where(self.places < counts, first_rows + self.places, len(embedded))
        longer = torch.cat([embedded, embedded[:1]])
        longer[rows.clamp_(max=len(embedded))] = self.embeddings.to(embedded.dtype)
        return longer[:-1]


class TargetStates:
    """Gathers the states that a head reads with the committed tokens, in one launch.

    A step leaves the target's states (of some layers, or the last ones) at all nodes; the head
    needs the accepted path's. They do not outlive the step, so the head reads in every step.

    Attributes:
        gathered: ``[rows, W]``: a buffer that stays in place; states of all layers side by side.

    Args:
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
        mm_inputs: Any,
    ) -> None:
        """Notes a step's states ``[T, H]``, `ToldByRunner.accepted`, and gives the head the
        embeddings of its images, see `ImageRows.of`."""
        self._layers, self._accepted = self._head.states_read(last, auxiliary), accepted
        self._first_rows = batch.query_start_loc[: batch.num_reqs + 1]
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
