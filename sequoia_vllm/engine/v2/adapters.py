"""LoRA adapters where a request has a row of logits for every node of its tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState


class AdaptersOfNodes(LoraState):
    """vLLM's, which maps a request's tokens and one row of logits to its adapter.

    In each step the runner calls `expect_rows`, and then `make_lora_inputs`.
    """

    def expect_rows(self, rows: NDArray[np.int32]) -> None:
        """Takes how many rows of logits each request of the step's batch has.

        Args:
            rows: int ``[requests]``.
        """
        self._rows = rows

    def make_lora_inputs(
        self,
        req_ids: list[str],
        idx_mapping: NDArray[np.int32],
        num_scheduled_tokens: NDArray[np.int32],
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        """Makes vLLM's inputs, with all rows of logits."""
        of_requests, of_tokens, active = super().make_lora_inputs(
            req_ids, idx_mapping, num_scheduled_tokens
        )
        return tuple(np.repeat(of_requests, self._rows).tolist()), of_tokens, active
