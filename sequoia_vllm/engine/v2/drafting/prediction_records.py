"""What users foretell, on the device by request slot, while their requests run."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from sequoia_vllm.engine.core.eligibility import may_branch_on_v2
from sequoia_vllm.engine.core.prediction_option import foretold
from sequoia_vllm.kernels.predictions import new_record


class PredictionRecords:
    """Keeps the records of requests that have a prediction; others take no memory.

    A record has four bytes a token. It is allocated beside the memory that vLLM planned.

    Attributes:
        may_branch: bool ``[slots]``: whose requests may have branches (`kernels.told_branches`).

    Args:
        addresses: int64 ``[slots]``, written in the stream's order: where each record is.
        depth: Of the engine's tree.
        longest: Most tokens of a branch; ``depth``: there are no branches.
    """

    def __init__(self, addresses: Tensor, depth: int, longest: int) -> None:
        self._addresses, self._depth, self.longest = addresses, depth, longest
        self._records: dict[int, Tensor] = {}
        self.may_branch = np.zeros(len(addresses), dtype=bool)

    def start(self, slot: int, sampling_params: Any, prompt_tokens: int) -> None:
        """Notes a new or resumed request in this slot."""
        self.forget(slot)
        if (tokens := foretold(sampling_params)) is not None:
            branches = self.longest > self._depth and may_branch_on_v2(sampling_params)
            self.may_branch[slot] = branches
            record = new_record(tokens, prompt_tokens, branches)
            self._records[slot] = async_tensor_h2d(record, device=self._addresses.device)
            self._addresses[slot].fill_(self._records[slot].data_ptr())

    def most_accepted(self, slots: NDArray[np.intp]) -> int:
        """The most drafts that a step can accept of any request in these slots."""
        return self.longest if self.may_branch[slots].any() else self._depth

    def forget(self, slot: int) -> None:
        """Drops what the slot's request had, if it had a prediction."""
        if self._records.pop(slot, None) is not None:
            self._addresses[slot].fill_(0)
            self.may_branch[slot] = False
