"""Decides how each request's drafts are drawn and verified on Model Runner V2."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from sequoia_vllm.engine.core.eligibility import WITHOUT_TREES, TreeTerms
from sequoia_vllm.kernels.modes import SAMPLED, SKIP

_ANY_NUMBER = np.iinfo(np.int32).max


class RequestModes:
    """The mode of every request slot, and the most nodes it verifies, on host and device.

    In a step that adds requests, the runner calls `start` for each of them, then `apply_starts`.

    Args:
        longest: See `TreeTerms.of`.
    """

    def __init__(self, max_num_reqs: int, longest: int) -> None:
        self._modes = UvaBackedTensor(max_num_reqs, dtype=torch.int32)
        self._most_nodes = UvaBackedTensor(max_num_reqs, dtype=torch.int32)
        self._most_committed = np.zeros(max_num_reqs, dtype=np.int32)
        self._is_static = np.ones(max_num_reqs, dtype=bool)
        self.some_draft = True  # false if no request of this engine ever drafts
        self._longest = longest

    @property
    def gpu(self) -> Tensor:
        """int32 ``[slots]``: the modes (`kernels.modes`) on the device."""
        return self._modes.gpu

    @property
    def most_nodes(self) -> Tensor:
        """int32 ``[slots]``: the most nodes that each request may verify."""
        return self._most_nodes.gpu

    def give_no_drafts(self) -> None:
        """Stops all drafts, for processors of the user's, which may read a path's tokens."""
        self.some_draft = False

    def sampled(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which requests in these slots have drafts and sample without a seed."""
        return self._modes.np[slots] == SAMPLED

    def can_choose(self, slots: NDArray[np.intp]) -> bool:
        """Whether all of these slots' requests may have dynamic trees: one launch grows them."""
        return not self._is_static[slots].any()

    def has_drafts(self, slot: int) -> bool:
        """Whether the request in this slot ever drafts."""
        return int(self._modes.np[slot]) != SKIP

    def can_draft(self, slots: NDArray[np.intp], committed: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these slots ``[R]`` can use a tree, given the least committed tokens ``[R]``."""
        return self._most_committed[slots] >= committed

    def start(self, slot: int, sampling_params: Any, prompt_tokens: int) -> None:
        """Notes a request that begins or resumes in this slot."""
        terms = WITHOUT_TREES
        if self.some_draft:
            terms = TreeTerms.of(sampling_params, prompt_tokens, self._longest)
        most = terms.most_drafts
        self._modes.np[slot], self._is_static[slot] = terms.drafts_by, terms.is_static
        self._most_committed[slot] = terms.most_committed
        self._most_nodes.np[slot] = _ANY_NUMBER if most is None else most + 1

    def apply_starts(self) -> None:
        """Makes the modes of the requests that started visible to the device."""
        self._modes.copy_to_uva()
        self._most_nodes.copy_to_uva()
