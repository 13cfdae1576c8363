"""LoRA adapters for requests with a row of logits for every node of their tree."""

import numpy as np
from numpy.typing import NDArray
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState


class AdaptersOfNodes(LoraState):
    """Maps all rows of a request's logits to its adapter; vLLM's class maps one row.

    In each step the runner calls `expect_rows`, then `make_lora_inputs`.
    """

    def expect_rows(self, rows: NDArray[np.int32]) -> None:
        """Notes the number of logits rows of each request in the batch, int ``[requests]``."""
        self._rows = rows

    # Until: vLLM's V2 runner maps all rows of logits to adapters.
    def make_lora_inputs(
        self,
        req_ids: list[str],
        idx_mapping: NDArray[np.int32],
        num_scheduled_tokens: NDArray[np.int32],
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        """Calls vLLM's, and repeats each request's adapter for all its rows of logits."""
        of_requests, of_tokens, active = super().make_lora_inputs(
            req_ids, idx_mapping, num_scheduled_tokens
        )
        return tuple(np.repeat(of_requests, self._rows).tolist()), of_tokens, active
