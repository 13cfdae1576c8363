"""Tracks requests whose logits need more than a division by the temperature."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates


class LogitsNeeds:
    """The edits that each request slot needs to its logits: none, a temperature, or more.

    vLLM's sampler calls `add_request` when a request begins or resumes, and in it
    `add_to_states`. In each step the verifier calls `any_more` and `nothing` for the requests
    that it verifies, to leave their logits alone where it can.

    vLLM's sampler keeps one flag per slot, raised by a temperature as by anything else that
    `Sampler.apply_sampling_params` does. `add_request` takes the place of the sampler's, and
    `add_to_states` that of its states'. In between, the flag is that of a request with temperature
    1. So any edit that vLLM adds later counts as more.
    """

    def __init__(self, sampler: Sampler) -> None:
        states = sampler.sampling_states
        self._needed = sampler.needs_logits_processing
        self._more_needed = np.ones_like(self._needed)  # of slots that nothing is known of
        self._temperatures = states.temperature.np
        self._add_request = sampler.add_request
        self._add_to_states = states.add_request
        self._states_at_one = SamplingStates(1, states.vocab_size)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Takes the place of the sampler's: a request begins or resumes in this slot."""
        self._add_request(req_idx, sampling_params)
        self._more_needed[req_idx] = self._needed[req_idx]
        self._needed[req_idx] |= self._temperatures[req_idx] not in (0.0, 1.0)

    def add_to_states(self, req_idx: int, sampling_params: Any) -> bool:
        """Takes the place of its states': tells whether they need more than the temperature."""
        if not self._add_to_states(req_idx, sampling_params):
            return False
        at_one = copy(sampling_params)
        at_one.temperature, at_one.seed = 1.0, 0  # without a seed one would be drawn
        return self._states_at_one.add_request(0, at_one)

    def any_more(self, slots: NDArray[np.intp]) -> bool:
        """Whether some of these slots need more than a temperature."""
        return bool(self._more_needed[slots].any())

    def nothing(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of these slots need nothing at all: their logits are final."""
        return ~self._needed[slots]
