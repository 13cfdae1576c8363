"""Logits processors of a user's, for Model Runner V1."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    LogitsProcessor,
    process_dict_updates,
)

Edit = Callable[[Sequence[int], Tensor], Tensor]


class EvenTokensOnly(LogitsProcessor):
    """Looks at no token, and does not say so."""

    def __init__(self, *_: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        logits[:, 1::2] = float("-inf")
        return logits


class Tilted(LogitsProcessor):
    """Adds what a request says to all of its even tokens, and says that trees may have it."""

    sequoia_trees = True

    def __init__(self, *_: Any) -> None:
        self.added: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self.added, batch_update, lambda params, *_: (params.extra_args or {}).get("tilt")
        )

    def apply(self, logits: Tensor) -> Tensor:
        rows = list(self.added)
        assert max(rows, default=0) < len(logits), "rows are requests"
        logits[rows, ::2] += torch.tensor(list(self.added.values()))[:, None]
        return logits


def without_last(count: int) -> Edit:
    """Excludes the last tokens of the output, in place."""

    def edit(output: Sequence[int], logits: Tensor) -> Tensor:
        for token in output[-count:]:
            logits[token] = float("-inf")
        return logits

    return edit


class WithoutLast(AdapterLogitsProcessor):
    """Excludes so many of the last tokens as a request says."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Edit | None:
        count = (params.extra_args or {}).get("without_last")
        return without_last(count) if count else None


class BySum(AdapterLogitsProcessor):
    """Adds to one token more of the prompt after each token, in a new row."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        bias = (params.extra_args or {}).get("by_sum")

        def edit(prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
            own = torch.zeros_like(logits)
            own[prompt[sum(output) % len(prompt)]] = bias
            return logits + own

        return edit if bias else None


class Sharper(AdapterLogitsProcessor):
    """Divides the temperature, by how many tokens there are."""

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: Any) -> Edit | None:
        sharper = (params.extra_args or {}).get("sharper")

        def edit(output: Sequence[int], logits: Tensor) -> Tensor:
            return logits * (1 + sharper * (sum(output) % 3))

        return edit if sharper else None


FOR_TREES = [f"{__name__}:{kind.__name__}" for kind in (Tilted, WithoutLast, BySum, Sharper)]
KINDS: dict[str, dict[str, Any]] = {
    "by the last tokens": {"extra_args": {"without_last": 3}},
    "by all tokens": {"extra_args": {"by_sum": 9.0}, "presence_penalty": 0.5},
    "by the request": {"extra_args": {"tilt": 2.0}},
    "sharper": {"extra_args": {"sharper": 0.5}, "top_p": 0.9, "min_p": 0.01},
    "several": {"extra_args": {"tilt": -4.0, "without_last": 2, "sharper": 0.2}},
    "none": {},
}
