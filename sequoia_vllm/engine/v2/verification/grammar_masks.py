"""Grammar masks on Model Runner V2: one for each scored node, and memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker


class MasksOfNodes(StructuredOutputsWorker):
    """vLLM's worker for grammar masks, with one mask for each node, request after request.

    `TreeGrammars` fills one mask per scored node. The warm-up of some versions (`CHANGED`, of
    `compat.versions`) sends `largest` masks for each request. For both, every row of logits is a
    request with one position to vLLM's code.

    Args:
        most: Masks that there is room for; more are applied in turns.
        mask_stride: Nodes of the largest tree.
        others: vLLM's arguments. We replace ``max_num_logits``, which has room for the largest
            trees of all requests: gigabytes if they are many.
    """

    def __init__(self, most: int, mask_stride: int, **others: Any) -> None:
        super().__init__(**(others | {"max_num_logits": most, "mask_stride": 1}))
        self._most = most
        self.largest = mask_stride  # in the warm-up, of the size that is warmed up

    # Until: vLLM's engine core sends one mask for each node, and makes room by its schedule.
    def apply_grammar_bitmask(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        grammar_req_ids: list[str],
        grammar_bitmask: NDArray[np.int32],
    ) -> None:
        """Forbids tokens of logits ``[rows, V]``, in place.

        Args:
            grammar_req_ids: Requests that have masks, in the masks' order.
            grammar_bitmask: int32 ``[masks, V / 32]``: one bit per allowed token.
        """
        if not grammar_req_ids:
            return
        places = {name: place for place, name in enumerate(input_batch.req_ids)}
        masks, rows = place_masks(
            len(grammar_bitmask),
            [places[name] for name in grammar_req_ids],
            input_batch.cu_num_logits_np,
            self.largest,
        )
        if len(masks) < len(grammar_bitmask):
            grammar_bitmask = grammar_bitmask[masks]
        # The part of a batch that vLLM's code reads; here each request has one row of logits.
        ends = np.arange(len(logits) + 1, dtype=np.int32)
        is_drafted = len(logits) > len(input_batch.req_ids)
        of_logits = SimpleNamespace(
            req_ids=range(len(logits)),  # the rows' numbers
            cu_num_logits=(
                torch.arange(len(ends), dtype=torch.int32, device=self.device)
                if is_drafted
                else input_batch.cu_num_logits  # the same numbers, without a launch
            ),
            cu_num_logits_np=ends,
            num_draft_tokens_per_req=None,  # none, as without speculation
        )
        for start in range(0, len(rows), self._most):
            part = slice(start, start + self._most)
            super().apply_grammar_bitmask(
                logits, of_logits, rows[part].tolist(), grammar_bitmask[part]
            )


def place_masks(
    num_masks: int, requests: Sequence[int], cu_rows: NDArray[np.int32], largest: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Finds the masks of scored nodes, and these nodes' rows of logits.

    Args:
        num_masks: One mask per scored node, or ``largest`` per request, scored nodes first.
        requests: Batch indices of the requests that have masks, in order.
        cu_rows: int32 ``[requests of the batch + 1]``: first row of each request.
        largest: Nodes of the largest tree.

    Raises:
        ValueError: The number of masks is neither.
    """
    first, counts = cu_rows[requests], np.diff(cu_rows)[requests]
    ends = np.cumsum(counts)
    scored = int(ends[-1])
    if num_masks == scored:
        blocks = ends - counts
    elif num_masks == len(requests) * largest:
        blocks = np.arange(len(requests)) * largest
    else:
        raise ValueError(
            f"{num_masks} masks of grammars for {len(requests)} requests of which {scored} nodes "
            f"are scored, of {largest} each at most"
        )
    nodes = np.arange(scored) - np.repeat(ends - counts, counts)
    return np.repeat(blocks, counts) + nodes, np.repeat(first, counts) + nodes
