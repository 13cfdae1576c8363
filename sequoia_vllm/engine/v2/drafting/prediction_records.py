"""What users foretell, on the device by request slot, while their requests run."""

from typing import Any

from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from sequoia_vllm.engine.core.prediction_option import foretold
from sequoia_vllm.kernels.predictions import new_record


class PredictionRecords:
    """Keeps the records of requests that have a prediction; others take no memory.

    A record has four bytes a token. It is allocated beside the memory that vLLM planned.

    Args:
        addresses: int64 ``[slots]``, written in the stream's order: where each record is.
    """

    def __init__(self, addresses: Tensor) -> None:
        self._addresses = addresses
        self._records: dict[int, Tensor] = {}

    def start(self, slot: int, sampling_params: Any, prompt_tokens: int) -> None:
        """Notes a new or resumed request in this slot."""
        self.forget(slot)
        if (tokens := foretold(sampling_params)) is not None:
            record = new_record(tokens, prompt_tokens)
            self._records[slot] = async_tensor_h2d(record, device=self._addresses.device)
            self._addresses[slot].fill_(self._records[slot].data_ptr())

    def forget(self, slot: int) -> None:
        """Drops what the slot's request had, if it had a prediction."""
        if self._records.pop(slot, None) is not None:
            self._addresses[slot].fill_(0)
