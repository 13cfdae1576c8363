"""The outcome of verification as the output of vLLM's V1 sampler, for the whole batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from sequoia_vllm.engine.runner.tensor_parallel import take_from_rank0
from sequoia_vllm.step.score import StepState
from sequoia_vllm.step.verify import TargetDistribution
from sequoia_vllm.verification.sampling import Truncation
from sequoia_vllm.verification.topology import VerifyResult, drawn_at


def truncation_of(metadata: SamplingMetadata, sampling_params: list[Any]) -> Truncation:
    """The top-k, top-p and min-p of a batch's requests."""
    min_p = [params.min_p if params is not None else 0.0 for params in sampling_params]
    return Truncation(
        top_k=metadata.top_k,
        top_p=metadata.top_p,
        min_p=torch.tensor(min_p) if any(min_p) else None,
    )


def without_discarded(metadata: SamplingMetadata, discarded: NDArray[np.bool_]) -> SamplingMetadata:
    """Drops generators of requests in mid-prefill, as vLLM rewinds them, and CPUs' cannot be."""
    if not metadata.generators:
        return metadata
    kept = {r: generator for r, generator in metadata.generators.items() if not discarded[r]}
    return replace(metadata, generators=kept)


def combine_outputs(
    sampler: Sampler,
    trees: StepState,
    result: VerifyResult,
    logits: Tensor,
    target: TargetDistribution,
    metadata: SamplingMetadata,
    num_reqs: int,
) -> SamplerOutput:
    """vLLM's sampler output for the whole batch: verified trees and sampled tokens.

    Args:
        logits: ``[rows, V]``: the target's logits, unprocessed.
        target: The distributions that the trees were verified with.
        num_reqs: Requests in the batch, those without trees included.

    Returns:
        Token ids int32 ``[requests, W]``, -1 padded. Logprobs if asked for: ``requests * W`` rows,
        as vLLM's rejection sampler returns them.
    """
    all_have_trees = len(trees.requests) == num_reqs
    if all_have_trees and not wants_logprobs(metadata):
        return SamplerOutput(result.output_tokens.to(torch.int32), logprobs_tensors=None)
    # Logprobs have rows of their own; the sampler samples at the roots of requests without trees.
    root_rows, tokens, logits_rows, without_tree = rows_of(trees, result, num_reqs)
    sampled = None
    if not all_have_trees:
        in_tree = set(trees.requests.tolist())
        own = {r: g for r, g in metadata.generators.items() if r not in in_tree}
        sampled = sampler(
            logits=logits[root_rows], sampling_metadata=replace(metadata, generators=own)
        )
        take_from_rank0(sampled.sampled_token_ids)
        tokens[without_tree, 0] = sampled.sampled_token_ids[without_tree, 0].long()
    logprobs = None
    if wants_logprobs(metadata):
        values = _values(sampler.logprobs_mode, logits_rows, logits, target)
        logprobs = _logprobs(sampler, values, tokens, metadata)
        if sampled is not None and sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            # `target` does not cover requests without trees: they keep the sampler's logprobs.
            requests, width = without_tree.nonzero().squeeze(1), tokens.shape[1]
            for ours, theirs in zip(logprobs[:3], sampled.logprobs_tensors[:3], strict=True):
                ours[requests * width] = theirs[requests]
    return SamplerOutput(sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=logprobs)


def rows_of(
    trees: StepState, result: VerifyResult, num_reqs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finds the logits row behind each emitted token.

    Returns each request's root row ``[requests]``, emitted tokens ``[requests, W]``, -1 padded,
    their rows ``[requests, W]``, where padding repeats the root's, and which have no tree.
    """
    rows_of_request = torch.ones(num_reqs, dtype=torch.int64)
    rows_of_request[trees.requests] = trees.num_nodes
    root_rows = rows_of_request.cumsum(0) - rows_of_request
    width = result.output_tokens.shape[1]
    tokens = torch.full((num_reqs, width), -1, dtype=torch.int64)
    tokens[trees.requests] = result.output_tokens
    nodes = torch.zeros(num_reqs, width, dtype=torch.int64)
    nodes[trees.requests] = drawn_at(result.accepted_nodes)
    without_tree = torch.ones(num_reqs, dtype=torch.bool)
    without_tree[trees.requests] = False
    return root_rows, tokens, root_rows[:, None] + nodes, without_tree


def cut(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Applies top-k and top-p as vLLM's sampler does, see `TargetDistribution.cut`."""
    return apply_top_k_top_p(logits, top_k, top_p)


def wants_logprobs(metadata: SamplingMetadata) -> bool:
    """Whether any request of the batch asks for logprobs."""
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def _values(mode: str, rows: Tensor, logits: Tensor, target: TargetDistribution) -> Tensor:
    """Values to report of all tokens at rows ``[requests, W]``, float32 ``[requests * W, V]``."""
    if mode in PROCESSED_LOGPROBS_MODES:
        requests = torch.arange(len(rows)).repeat_interleave(rows.shape[1])
        values = target.process(rows.flatten(), requests)
    else:
        values = logits[rows.flatten()].to(torch.float32)
    return Sampler.compute_logprobs(values) if mode.endswith("logprobs") else values


def _logprobs(
    sampler: Sampler, values: Tensor, tokens: Tensor, metadata: SamplingMetadata
) -> LogprobsTensors:
    emitted = tokens.flatten().clamp(min=0)
    if metadata.logprob_token_ids:
        width = tokens.shape[1]
        by_row = {
            request * width + column: ids
            for request, ids in metadata.logprob_token_ids.items()
            for column in range(width)
        }
        return sampler.gather_specific_token_logprobs(values, by_row, emitted)
    return sampler.gather_logprobs(values, metadata.max_num_logprobs, emitted)
