"""A logits processor for Model Runner V2 that looks at the tokens so far."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class NoTokenTwice(LogitsProcessor):
    """Excludes the token that was read at the row's own position, which chains know."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return logits.scatter_(1, ctx.input_ids[:, None].long(), -torch.inf)

    def apply_staged_writes(self) -> None:
        pass
