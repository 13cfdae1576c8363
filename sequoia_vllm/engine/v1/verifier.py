"""Verification of one step's trees, of all kinds of requests, and the output of the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from sequoia_vllm.engine.runner.tensor_parallel import take_from_rank0
from sequoia_vllm.engine.v1.batch_trees import Draft, ScoringTreesV1
from sequoia_vllm.engine.v1.seeded import consume_seeds, peek_seeds
from sequoia_vllm.verification.methods import DEFAULT_METHOD, method_of
from sequoia_vllm.verification.replaced import verify_replaced
from sequoia_vllm.verification.sampling import GREEDY_BELOW, Truncation
from sequoia_vllm.verification.topology import Topology, VerifyResult
from sequoia_vllm.verification.walk import match_nodes, match_tree, take_rows


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

    The verifier asks for rows that its walk reaches: `probabilities`, or `process` with a seed.
    """

    logits: Tensor  # ``[rows, V]``: the target's logits of this step, any float dtype
    temperature: Tensor | None  # float32 ``[requests]``, or None if all are greedy
    truncation: Truncation  # what each request excludes

    def process(self, rows: Tensor, requests: Tensor) -> Tensor:
        """Logits after the sampling parameters of their requests.

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


@dataclass(frozen=True)
class TreeVerifierV1:
    """Applies the Sequoia verifier to the trees of one step.

    Greedy requests are matched against the target's argmax, seeded requests against the token that
    their seed gives (see `seeded`). `method` verifies the others with the stored Q.
    """

    greedy_argmax: Callable[[Tensor], Tensor]  # ``logits [R, V] -> tokens [R]``: the engine's
    seeded_argmax: Callable[[Tensor, Tensor], Tensor]
    """``(logits [R, V], seeds [R]) -> tokens [R]``: the engine's own."""
    method: str = DEFAULT_METHOD  # name of the method that verifies sampled requests

    def verify(
        self,
        trees: ScoringTreesV1,
        target: TargetDistribution,
        generators: dict[int, torch.Generator],
    ) -> VerifyResult:
        """Accepted nodes and emitted tokens of every tree, in the order of ``trees.requests``.
        The generators of seeded requests, by index, advance by one draw per emitted token."""
        if target.temperature is None:
            everyone = torch.arange(len(trees.requests))
            return self._verify_greedy(trees, everyone, target)
        greedy = target.temperature[trees.requests] < GREEDY_BELOW
        seeded = torch.tensor([request in generators for request in trees.requests.tolist()])
        kinds = (
            (greedy, self._verify_greedy),
            (seeded & ~greedy, partial(self._verify_seeded, generators=generators)),
            (~seeded & ~greedy, self._verify_sampled),
        )
        results = []
        for is_kind, verify in kinds:
            chosen = is_kind.nonzero().squeeze(1)
            if len(chosen):
                results.append((chosen, verify(trees, chosen, target)))
        if len(results) == 1:
            return results[0][1]
        return _merge(results, len(greedy))

    def _verify_greedy(
        self, trees: ScoringTreesV1, chosen: Tensor, target: TargetDistribution
    ) -> VerifyResult:
        logits, tokens = target.logits, take_rows(trees.tokens, chosen)
        if not trees.is_all or len(chosen) < len(trees.requests):
            logits = logits[trees.logits_rows[chosen].flatten()]
        target_tokens = self.greedy_argmax(logits.to(torch.float32)).view(tokens.shape)
        return match_nodes(target_tokens, tokens, topology_of(take_rows(trees.parents, chosen)))

    def _verify_seeded(
        self,
        trees: ScoringTreesV1,
        chosen: Tensor,
        target: TargetDistribution,
        generators: dict[int, torch.Generator],
    ) -> VerifyResult:
        requests_in_batch = trees.requests[chosen]
        own = [generators[request] for request in requests_in_batch.tolist()]
        seeds = torch.stack([peek_seeds(generator, trees.tokens.shape[1]) for generator in own])

        def target_token(requests: Tensor, nodes: Tensor, depth: int) -> Tensor:
            rows = trees.first_logits_row[chosen[requests]] + nodes
            logits = target.process(rows, requests_in_batch[requests])
            return self.seeded_argmax(logits, seeds[requests, depth])

        topology = topology_of(trees.parents[chosen])
        result = match_tree(target_token, trees.tokens[chosen], topology)
        for generator, accepted in zip(own, result.num_accepted.tolist(), strict=True):
            consume_seeds(generator, accepted + 1)
        return result

    def _verify_sampled(
        self, trees: ScoringTreesV1, chosen: Tensor, target: TargetDistribution
    ) -> VerifyResult:
        requests_in_batch = trees.requests[chosen]
        probs, probs_rows = _draft_probs(
            [trees.drafts[row] for row in chosen.tolist()], trees.tokens.shape[1]
        )

        def target_at(requests: Tensor, nodes: Tensor) -> Tensor:
            rows = trees.first_logits_row[chosen[requests]] + nodes
            return target.probabilities(rows, requests_in_batch[requests])

        def draft_at(requests: Tensor, nodes: Tensor) -> Tensor:
            return probs[probs_rows[requests, nodes]]

        verify = method_of(self.method).host_function()
        topology = topology_of(trees.parents[chosen])
        drawn, scored = trees.drawn[chosen], trees.tokens[chosen]
        if torch.equal(drawn, scored):
            return verify(target_at, draft_at, drawn, topology)
        return verify_replaced(verify, target_at, draft_at, drawn, scored, topology)


def topology_of(parents: Tensor) -> Topology:
    """`Topology` of trees with parents int64 ``[B, N]``; cached, as most steps repeat them."""
    host = parents.numpy()
    return _topology(host.tobytes(), host.shape)


@lru_cache(maxsize=1024)
def _topology(parents: bytes, shape: tuple[int, int]) -> Topology:
    array = np.frombuffer(parents, dtype=np.int64).reshape(shape)
    return Topology.from_parents(torch.from_numpy(array.copy()))


def _draft_probs(drafts: list[Draft | None], max_nodes: int) -> tuple[Tensor, Tensor]:
    """Stored Q of these drafts: ``probs [P, V]`` and the row of each node, ``[B, max_nodes]``."""
    passes = {id(draft.grown): draft.grown for draft in drafts if draft is not None}
    if not passes:
        return torch.zeros(0, 0), torch.zeros(len(drafts), max_nodes, dtype=torch.int64)
    stored = [grown.probs for grown in passes.values()]
    starts = accumulate((len(part) for part in stored[:-1]), initial=0)
    offsets = dict(zip(passes, starts, strict=True))
    probs = stored[0] if len(stored) == 1 else torch.cat(stored)
    rows = torch.zeros(len(drafts), max_nodes, dtype=torch.int64)
    for index, draft in enumerate(drafts):
        if draft is not None:
            own = draft.grown.probs_rows[draft.row, :max_nodes]
            rows[index, : len(own)] = own + offsets[id(draft.grown)]
    return probs, rows


def _merge(results: list[tuple[Tensor, VerifyResult]], batch: int) -> VerifyResult:
    """Joins the results of disjoint sets of rows in batch order."""
    depth = max(result.accepted_nodes.shape[1] for _, result in results)
    accepted = torch.full((batch, depth), -1, dtype=torch.int64)
    tokens = torch.full((batch, depth + 1), -1, dtype=torch.int64)
    counts = torch.zeros(batch, dtype=torch.int64)
    for chosen, result in results:
        accepted[chosen, : result.accepted_nodes.shape[1]] = result.accepted_nodes
        tokens[chosen, : result.output_tokens.shape[1]] = result.output_tokens
        counts[chosen] = result.num_accepted
    return VerifyResult(accepted, tokens, counts)


# -- the sampler in a step with trees ---------------------------------------------------


def without_discarded(metadata: SamplingMetadata, discarded: NDArray[np.bool_]) -> SamplingMetadata:
    """Drops generators of requests in mid-prefill, as vLLM rewinds them, and CPUs' cannot be."""
    if not metadata.generators:
        return metadata
    kept = {r: generator for r, generator in metadata.generators.items() if not discarded[r]}
    return replace(metadata, generators=kept)


def combine_outputs(
    sampler: Sampler,
    trees: ScoringTreesV1,
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
    trees: ScoringTreesV1, result: VerifyResult, num_reqs: int
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
    # Token j of a path was drawn at its node j - 1; the first at the root.
    nodes = torch.zeros(num_reqs, width, dtype=torch.int64)
    nodes[trees.requests, 1:] = result.accepted_nodes.clamp(min=0)
    without_tree = torch.ones(num_reqs, dtype=torch.bool)
    without_tree[trees.requests] = False
    return root_rows, tokens, root_rows[:, None] + nodes, without_tree


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


def forget_stale_budgets(holder: ThinkingBudgetStateHolder, sampling_params: Sequence[Any]) -> None:
    """Removes budgets from the rows of requests, in batch order, that have none.

    vLLM keeps budgets by batch row. When a request ends, another one without a budget may move into
    its row. The sampler would force the end of thinking on it, and on its neighbours with drafts.
    """
    if not holder.has_tracked_requests():
        return
    rows = [row for row, p in enumerate(sampling_params) if p.thinking_token_budget is None]
    holder.sync_batch(BatchUpdate(len(sampling_params), removed=rows, added=(), moved=()))
