"""Which of vLLM's chains are worth running: all lengths, predicted from the longest one.

An engine that drafts a chain of 8 shows how often its first i drafts are accepted, which
is what a shorter chain would accept too (of block verification a little more than that,
since it decides about the whole chain). A step's time is taken to grow evenly with every
draft, from plain vLLM's target pass to the one over 9 tokens. Only the choice is made by
prediction: what is reported of a chain was measured with an engine of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sequoia_vllm.bench.chain_sampling import DEFAULT, ChainSampling
from sequoia_vllm.bench.rounds import Case, RoundRun

MOST_DRAFTS = 8
# Chains of a case that are run: two, and a third that is predicted within 3 % of the first.
_SURELY_RUN = 2
_RUN = 3
_CLOSE = 0.97


@dataclass(frozen=True)
class Chain:
    """One of vLLM's chains: how long, and how it samples."""

    drafts: int
    sampling: ChainSampling = DEFAULT


@dataclass(frozen=True)
class Predicted:
    """What a chain would do in a case.

    Attributes:
        chain: The chain.
        tokens_per_step: Of one request.
        tokens_per_second: Of the whole batch.
    """

    chain: Chain
    tokens_per_step: float
    tokens_per_second: float


def predict(
    plain: RoundRun, longest: RoundRun, sampling: ChainSampling, drafts: int = MOST_DRAFTS
) -> list[Predicted]:
    """Every chain up to the longest, shortest first.

    Args:
        plain: Plain vLLM's round in this case.
        longest: The round of a chain of ``drafts``, in the same case.
        sampling: Of the chain.
        drafts: Its length.
    """
    steps = max(1, longest.parts["steps"])
    drafting = (longest.parts["draft"] + longest.parts["drawing"]) / steps
    target = longest.parts["target"] / steps
    first = plain.parts["target"] / max(1, plain.parts["steps"])
    whole = longest.steady.step_seconds
    by_draft = max(0.0, target + drafting - first) / drafts
    accepted = accepted_shares(longest.step_tokens, drafts)
    found = []
    for length in range(1, drafts + 1):
        tokens = 1 + sum(accepted[:length])
        seconds = whole - by_draft * (drafts - length)
        rate = longest.steady.batch_size * tokens / seconds
        found.append(Predicted(Chain(length, sampling), tokens, rate))
    return found


def accepted_shares(step_tokens: Sequence[int], drafts: int) -> list[float]:
    """How often at least the first 1, 2, ... drafts were accepted.

    Args:
        step_tokens: Tokens that each request got in each step: one more than
            were accepted.
        drafts: Length of the chain.
    """
    count = max(1, len(step_tokens))
    return [sum(tokens > length for tokens in step_tokens) / count
            for length in range(1, drafts + 1)]  # fmt: skip


def choose(found: Mapping[Case, Sequence[Predicted]], most: int) -> dict[Case, list[Chain]]:
    """The chains to run in each case, with at most ``most`` different ones together.

    First every case gets the one predicted best, then the second, then a third
    if it is close.

    Args:
        found: Predictions in each case.
        most: Engines that may be started; at least 1.
    """
    wanted = {case: _wanted(predicted) for case, predicted in found.items()}
    # Their chains serve sampled cases as well, where there is no room for more.
    greedy_first = sorted(wanted, key=lambda case: case.temperature > 0)
    engines: list[Chain] = []
    for rank in range(_RUN):
        for case in greedy_first:
            new = [chain for chain in wanted[case][rank : rank + 1] if chain not in engines]
            engines += new[: most - len(engines)]
    return {case: _of_case(wanted[case], found[case], engines) for case in found}


def _wanted(predicted: Sequence[Predicted]) -> list[Chain]:
    best = _fastest_first(predicted)[:_RUN]
    enough = _CLOSE * best[0].tokens_per_second
    return [one.chain for rank, one in enumerate(best)
            if rank < _SURELY_RUN or one.tokens_per_second >= enough]  # fmt: skip


def _of_case(
    wanted: Sequence[Chain], predicted: Sequence[Predicted], engines: Sequence[Chain]
) -> list[Chain]:
    running = [chain for chain in wanted if chain in engines]
    if not running:  # too few engines for all cases: the best of those there are, if it can
        ordered = [one.chain for one in _fastest_first(predicted)]
        running = [chain for chain in ordered if chain in engines][:1]
    return sorted(running, key=lambda chain: (chain.drafts, chain.sampling.words))


def _fastest_first(predicted: Sequence[Predicted]) -> list[Predicted]:
    return sorted(predicted, key=lambda one: one.tokens_per_second, reverse=True)
