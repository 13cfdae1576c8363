"""A custom logits processor for the tests."""

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor


class EvenTokensOnly(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[:, 1::2] = float("-inf")
        return logits
