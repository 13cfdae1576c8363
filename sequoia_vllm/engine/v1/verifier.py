"""Verification of one step's trees: greedy, seeded and sampled requests in one batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sequoia_vllm.engine.v1.batch_trees import Draft, ScoringTreesV1
from sequoia_vllm.engine.v1.seeded import consume_seeds, peek_seeds
from sequoia_vllm.engine.v1.target_distribution import TargetDistribution
from sequoia_vllm.verification.methods import DEFAULT_METHOD, method_of
from sequoia_vllm.verification.replaced import verify_replaced
from sequoia_vllm.verification.topology import Topology, VerifyResult
from sequoia_vllm.verification.walk import match_nodes, match_tree, take_rows


@dataclass(frozen=True)
class TreeVerifierV1:
    """Applies the Sequoia verifier to the trees of one step.

    The runner calls `verify` once per step with trees, after the target's forward and before
    the commit. It changes nothing but the generators of seeded requests.

    Greedy requests are matched against the target's argmax, seeded requests against the token
    that their seed gives (see `seeded`). `method` verifies the others with the stored draft
    distributions; `verify_replaced` handles trees in which a grammar replaced drafts.
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
        """Accepted nodes and emitted tokens of every tree.

        Args:
            generators: Generators of the batch's seeded requests, by request
                index; each advances by one draw per emitted token.

        Returns:
            Rows in the order of ``trees.requests``.
        """
        if target.temperature is None:
            everyone = torch.arange(len(trees.requests), device=trees.requests.device)
            return self._verify_greedy(trees, everyone, target)
        greedy = target.is_greedy(trees.requests)
        seeded = torch.tensor(
            [request in generators for request in trees.requests.tolist()], device=greedy.device
        )
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
    host = parents.cpu().numpy()
    return _topology(host.tobytes(), host.shape).to(parents.device)


@lru_cache(maxsize=1024)
def _topology(parents: bytes, shape: tuple[int, int]) -> Topology:
    array = np.frombuffer(parents, dtype=np.int64).reshape(shape)
    return Topology.from_parents(torch.from_numpy(array.copy()))


def _draft_probs(drafts: list[Draft | None], max_nodes: int) -> tuple[Tensor, Tensor]:
    """Stored Q of these drafts: ``probs [P, V]`` and the row of each node, ``[B, max_nodes]``.

    A request without a draft of ours has no children: the verifier does not read its row.
    """
    passes = {id(draft.grown): draft.grown for draft in drafts if draft is not None}
    if not passes:
        return torch.zeros(0, 0), torch.zeros(len(drafts), max_nodes, dtype=torch.int64)
    stored = [grown.probs for grown in passes.values()]
    starts = accumulate((len(part) for part in stored[:-1]), initial=0)
    offsets = dict(zip(passes, starts, strict=True))
    probs = stored[0] if len(stored) == 1 else torch.cat(stored)
    rows = torch.zeros(len(drafts), max_nodes, dtype=torch.int64, device=probs.device)
    for index, draft in enumerate(drafts):
        if draft is not None:
            own = draft.grown.probs_rows[draft.row, :max_nodes]
            rows[index, : len(own)] = own + offsets[id(draft.grown)]
    return probs, rows


def _merge(results: list[tuple[Tensor, VerifyResult]], batch: int) -> VerifyResult:
    """Joins the results of disjoint sets of rows in batch order."""
    depth = max(result.accepted_nodes.shape[1] for _, result in results)
    device = results[0][0].device
    accepted = torch.full((batch, depth), -1, dtype=torch.int64, device=device)
    tokens = torch.full((batch, depth + 1), -1, dtype=torch.int64, device=device)
    counts = torch.zeros(batch, dtype=torch.int64, device=device)
    for chosen, result in results:
        accepted[chosen, : result.accepted_nodes.shape[1]] = result.accepted_nodes
        tokens[chosen, : result.output_tokens.shape[1]] = result.output_tokens
        counts[chosen] = result.num_accepted
    return VerifyResult(accepted, tokens, counts)
