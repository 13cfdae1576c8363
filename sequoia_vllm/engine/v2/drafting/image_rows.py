"""The embeddings of images that a head reads in place of those of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.draft_batch import DraftBatch


@dataclass(frozen=True)
class ImageRows:
    """Embeddings of a step's images, and which of the tokens that a head reads they belong to.

    vLLM counts a token by its row in the target's pass. There a request has a row for each of its
    nodes, and in the head's pass only for those that were accepted. Only the device knows these.

    Attributes:
        embeddings: ``[m, H]``.
        requests: int64 ``[m]``: the batch's request that each belongs to.
        places: int64 ``[m]``: its place among the tokens that the request reads.
        batch: What each request reads.
    """

    embeddings: Tensor
    requests: Tensor
    places: Tensor
    batch: DraftBatch

    @classmethod
    def of(cls, mm_inputs: Any, batch: InputBatch, reads: DraftBatch) -> ImageRows | None:
        """Takes what vLLM gives `propose`; None: the step reads no image.

        Args:
            mm_inputs: Embeddings ``[k, H]`` of each image, and bool ``[T]`` on the host: which rows
                of the target's pass, each for the token behind its own, have one. None: nothing.
            batch: The step's requests.
            reads: What the head reads of each.
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
        """``[rows, H]``: the tokens' embeddings with those of images in their places.

        Tokens that the head does not read have a row behind the others, which is cut.
        """
        first_rows, counts = self.batch.first_rows[self.requests], self.batch.counts[self.requests]
        rows = torch.where(self.places < counts, first_rows + self.places, len(embedded))
        longer = torch.cat([embedded, embedded[:1]])
        longer[rows.clamp_(max=len(embedded))] = self.embeddings.to(embedded.dtype)
        return longer[:-1]
