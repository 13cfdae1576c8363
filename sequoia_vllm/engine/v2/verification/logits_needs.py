"""Which requests' logits are edited before they are verified, on Model Runner V2."""

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates


class LogitsNeeds:
    """What each request's logits need: nothing, a division by the temperature, or more.

    vLLM's sampler has one flag per slot: whether `Sampler.apply_sampling_params` changes its
    logits. We replace the sampler's `add_request`, and its states' method within that call. There
    the flag is computed as if the temperature were 1: what it then says is "more". Edits that a
    later vLLM adds count as well.
    """

    def __init__(self, sampler: Sampler) -> None:
        states = sampler.sampling_states
        self._needed = sampler.needs_logits_processing
        self._more_needed = np.ones_like(self._needed)  # true until a slot's request is known
        self._temperatures = states.temperature.np
        self._add_request = sampler.add_request
        self._add_to_states = states.add_request
        self._states_at_one = SamplingStates(1, states.vocab_size)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Replaces the sampler's method: a request begins or resumes in this slot."""
        self._add_request(req_idx, sampling_params)
        self._more_needed[req_idx] = self._needed[req_idx]
        self._needed[req_idx] |= self._temperatures[req_idx] not in (0.0, 1.0)

    def add_to_states(self, req_idx: int, sampling_params: Any) -> bool:
        """Replaces its states' method: tells whether they need more than the temperature."""
        if not self._add_to_states(req_idx, sampling_params):
            return False
        at_one = copy(sampling_params)
        at_one.temperature, at_one.seed = 1.0, 0  # without a seed one would be drawn
        return self._states_at_one.add_request(0, at_one)

    def leaves_temperatures(self, slots: NDArray[np.intp], sampled: NDArray[np.bool_]) -> bool:
        """Whether the walk applies these requests' temperatures, to the few rows that it reads.

        Seeded requests need all rows, divided by vLLM to the bit, for the target's own tokens.
        """
        is_final = ~self._needed[slots]
        return not self._more_needed[slots].any() and bool((sampled | is_final).all())
