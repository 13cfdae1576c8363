"""The target's distributions at tree nodes, after the requests' sampling parameters."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from sequoia_vllm.verification.sampling import GREEDY_BELOW, Truncation


def truncation_of(metadata: SamplingMetadata, sampling_params: list[Any]) -> Truncation:
    """The top-k, top-p and min-p of a batch's requests."""
    min_p = [params.min_p if params is not None else 0.0 for params in sampling_params]
    return Truncation(
        top_k=metadata.top_k,
        top_p=metadata.top_p,
        min_p=torch.tensor(min_p) if any(min_p) else None,
    )


@dataclass(frozen=True)
class TargetDistribution:
    """Applies temperature, min-p, top-k and top-p as vLLM's sampler does, in its order.

    The runner makes one for each step with trees. The verifier asks only for rows that its
    walk reaches: `probabilities` where it samples, `process` where a seed decides. The step's
    logits stay unchanged.
    """

    logits: Tensor  # ``[rows, V]``: the target's logits of this step, any float dtype
    temperature: Tensor | None  # float32 ``[requests]``, or None if all are greedy
    truncation: Truncation  # what each request excludes

    def is_greedy(self, requests: Tensor) -> Tensor:
        """Which of these requests are greedy, bool ``[A]``; needs a batch where some are not."""
        assert self.temperature is not None
        return self.temperature[requests] < GREEDY_BELOW

    def process(self, rows: Tensor, requests: Tensor) -> Tensor:
        """Logits of these rows after the sampling parameters of their requests.

        Args:
            rows: int64 ``[A]``: rows of ``logits``.
            requests: int64 ``[A]``: the request of each row.

        Returns:
            float32 ``[A, V]``, a fresh tensor; excluded tokens are -inf. Greedy requests get
            temperature 1, and no processing if the whole batch is greedy, as in vLLM's sampler.
        """
        logits = self.logits[rows].to(torch.float32)
        if self.temperature is None:
            return logits
        temperature = self.temperature[requests]
        temperature = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
        logits.div_(temperature.unsqueeze(1))
        own = self.truncation.of(requests)
        if own.min_p is not None:
            probs = logits.softmax(dim=-1)
            floor = probs.amax(dim=-1, keepdim=True) * own.min_p.unsqueeze(1)
            logits.masked_fill_(probs < floor, float("-inf"))
        return apply_top_k_top_p(logits, own.top_k, own.top_p)

    def probabilities(self, rows: Tensor, requests: Tensor) -> Tensor:
        """P of these rows; float32 ``[A, V]``, a fresh tensor. See `process`."""
        return self.process(rows, requests).softmax(dim=-1, dtype=torch.float32)
