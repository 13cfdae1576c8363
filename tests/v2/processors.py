"""Logits processors for Model Runner V2 that look at the tokens so far."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class NoTokenTwice(LogitsProcessor):
    """Excludes the token that was read at the row's own position."""

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return logits.scatter_(1, ctx.input_ids[:, None].long(), -torch.inf)


class NoTokenTwiceAlone(NoTokenTwice):
    """The same, but not on trees."""

    sequoia_trees = False


class NoneOfLastThree(LogitsProcessor):
    """Excludes the last three tokens before each row: of the rows before it, as in a chain.

    Requests may decline.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states
        self._asked = torch.zeros(req_states.max_num_reqs, dtype=torch.bool)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._asked[req_idx] = not (sampling_params.extra_args or {}).get("repeat")
        return bool(self._asked[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        every, total = self._states.all_token_ids.gpu, self._states.total_len.gpu
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if not self._asked[slot]:
                continue
            drafts = int(ctx.expanded_local_pos[row])
            known = int(total[slot])
            assert int(ctx.pos[row]) in (known - 1 + drafts, known - 1), "chains, and padding"
            path = ctx.input_ids[row - drafts + 1 : row + 1].tolist()
            tokens = [*every[slot, max(known - 3, 0) : known].tolist(), *path][-3:]
            logits[row, tokens] = -torch.inf
        return logits
