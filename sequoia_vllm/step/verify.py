"""Verify: what is accepted and emitted of a step's trees, for all kinds of requests."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sequoia_vllm.step.grow import Draft
from sequoia_vllm.step.score import StepState
from sequoia_vllm.step.seeds import consume_seeds, peek_seeds
from sequoia_vllm.verification.methods import DEFAULT_METHOD, method_of
from sequoia_vllm.verification.replaced import verify_replaced
from sequoia_vllm.verification.sampling import Truncation, is_greedy
from sequoia_vllm.verification.topology import Topology, VerifyResult
from sequoia_vllm.verification.walk import match_nodes, match_tree, take_rows


@dataclass(frozen=True)
class TargetDistribution:
    """Applies temperature, min-p, top-k and top-p as the engine's sampler does, in its order.

    The verifier asks for rows that its walk reaches: `probabilities`, or `process` with a seed.
    """

    logits: Tensor  # ``[rows, V]``: the target's logits of this step, any float dtype
    temperature: Tensor | None  # float32 ``[requests]``, or None if all are greedy
    truncation: Truncation  # what each request excludes
    cut: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    """``(logits [A, V], top_k [A], top_p [A]) -> logits``: the engine's own top-k and top-p."""
    edit: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """``(logits [A, V], rows [A], requests [A]) -> logits``: edits that come before `cut`."""

    def process(self, rows: Tensor, requests: Tensor) -> Tensor:
        """Logits after the sampling parameters of their requests.

        Args:
            rows: int64 ``[A]``: rows of ``logits``.
            requests: int64 ``[A]``: the request of each row.

        Returns:
            float32 ``[A, V]``, a fresh tensor; excluded tokens are -inf. Greedy requests get
            temperature 1, and no processing if the whole batch is greedy.
        """
        logits = self.logits[rows].to(torch.float32)
        if self.temperature is None:
            return logits
        temperature = self.temperature[requests]
        temperature = torch.where(is_greedy(temperature), 1.0, temperature)
        logits.div_(temperature.unsqueeze(1))
        own = self.truncation.of(requests)
        if own.min_p is not None:
            probs = logits.softmax(dim=-1)
            floor = probs.amax(dim=-1, keepdim=True) * own.min_p.unsqueeze(1)
            logits.masked_fill_(probs < floor, float("-inf"))
        if self.edit is not None:
            logits = self.edit(logits, rows, requests)
        return self.cut(logits, own.top_k, own.top_p)

    def probabilities(self, rows: Tensor, requests: Tensor) -> Tensor:
        """P of these rows; float32 ``[A, V]``, a fresh tensor. See `process`."""
        return self.process(rows, requests).softmax(dim=-1, dtype=torch.float32)


@dataclass(frozen=True)
class TreeVerifier:
    """Applies the Sequoia verifier to the trees of one step.

    Greedy requests are matched against the target's argmax, seeded requests against the token that
    their seed gives (see `seeds`). `method` verifies the others with the stored Q.
    """

    greedy_argmax: Callable[[Tensor], Tensor]  # ``logits [R, V] -> tokens [R]``: the engine's
    seeded_argmax: Callable[[Tensor, Tensor], Tensor]
    """``(logits [R, V], seeds [R]) -> tokens [R]``: the engine's own."""
    method: str = DEFAULT_METHOD  # name of the method that verifies sampled requests

    def verify(
        self,
        trees: StepState,
        target: TargetDistribution,
        generators: dict[int, torch.Generator],
    ) -> VerifyResult:
        """Accepted nodes and emitted tokens of every tree, in the order of ``trees.requests``.
        The generators of seeded requests, by index, advance by one draw per emitted token."""
        if target.temperature is None:
            everyone = torch.arange(len(trees.requests))
            return self._verify_greedy(trees, everyone, target)
        greedy = is_greedy(target.temperature[trees.requests])
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
        self, trees: StepState, chosen: Tensor, target: TargetDistribution
    ) -> VerifyResult:
        logits, tokens = target.logits, take_rows(trees.tokens, chosen)
        is_node = take_rows(trees.is_node, chosen)
        if not trees.is_all or len(chosen) < len(trees.requests):
            logits = logits[trees.logits_rows[chosen][is_node]]
        target_tokens = torch.zeros_like(tokens)  # padding has none
        target_tokens[is_node] = self.greedy_argmax(logits.to(torch.float32)).view(-1)
        return match_nodes(target_tokens, tokens, topology_of(take_rows(trees.parents, chosen)))

    def _verify_seeded(
        self,
        trees: StepState,
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
        self, trees: StepState, chosen: Tensor, target: TargetDistribution
    ) -> VerifyResult:
        requests_in_batch = trees.requests[chosen]
        probs, probs_rows = _draft_probs(
            [trees.drafts[row] for row in chosen.tolist()], trees.tokens.shape[1]
        )

        def target_at(requests: Tensor, nodes: Tensor) -> Tensor:
            rows = trees.first_logits_row[chosen[requests]] + nodes
            return target.probabilities(rows, requests_in_batch[requests])

        def draft_at(requests: Tensor, nodes: Tensor) -> Tensor:
            stored = probs_rows[requests, nodes]
            if (told := stored < 0).any():
                draft = torch.zeros(len(nodes), target.logits.shape[1])
                draft[told, drawn[requests[told], nodes[told] + 1]] = 1
                if not told.all():
                    draft[~told] = probs[stored[~told]]
                return draft
            return probs[stored]

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
    """Stored Q of these drafts: ``probs [P, V]`` and the row of each node, ``[B, max_nodes]``.

    -1: none is stored. In a branch the next node's token has all of it.
    """
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
            rows[index, : len(own)] = torch.where(own < 0, -1, own + offsets[id(draft.grown)])
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
