"""A simulated server under open-loop arrivals: what users see, and what a controller is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sequoia_vllm.metrics.counts import paths_of
from sequoia_vllm.tree import TokenTree

_WALKS = 10_000


@cache
def walks_of(tree: TokenTree, acceptance: tuple[float, ...]) -> np.ndarray:
    """Algorithm 2's accepted nodes, of many trees: of each node child k with chance p[k]."""
    rng = np.random.default_rng(2)
    walks = np.full((_WALKS, tree.depth), -1)
    for walk in walks:
        node, draws = 0, rng.random(tree.depth)
        for depth, rank in enumerate(np.searchsorted(np.cumsum(acceptance), draws, "right")):
            if rank >= len(tree.children[node]):
                break
            node = walk[depth] = tree.children[node][rank]
    return walks


@dataclass(frozen=True)
class Machine:
    """Seconds of a step by a roofline, which is not of the form that controllers fit.

    Attributes:
        weights, row: Seconds to read the target's weights, and to compute one token.
        context, tree_context: Seconds to read one token of context; more for 16 nodes of a tree.
        draft: The draft's share of ``weights`` and ``row``.
        noise: Standard deviation of a step's logarithm.
        disturbed: Share of the steps that take three times as long.
    """

    weights: float = 0.01
    row: float = 1e-4
    context: float = 3e-8
    tree_context: float = 3e-8
    draft: float = 0.08
    noise: float = 0.06
    disturbed: float = 0.01

    def seconds(
        self, depth: int, drafts: int, trees: int, rows: int, prompts: int, context: int
    ) -> float:
        """Seconds of a step; ``rows`` are those of prompts and trees."""
        seconds = self._pass(rows) + self.context * context
        if drafts > 0:
            seconds += self.tree_context * context * (1 + drafts // 16)
        return seconds + self.drafting(depth, drafts, trees, prompts)

    def drafting(self, depth: int, drafts: int, trees: int, prompts: int) -> float:
        """Seconds of these in which the draft reads, and grows trees."""
        if drafts == 0:
            return 0.0
        return self.draft * (depth * self._pass(trees * drafts / depth) + self.row * prompts)

    def _pass(self, rows: float) -> float:
        return float((self.weights**3 + (self.row * rows) ** 3) ** (1 / 3))


@dataclass(eq=False)
class Request:
    """One request; what follows ``acceptance`` changes while it is served.

    Attributes:
        acceptance: p[child] of its trees, at any depth.
        unread, read: Tokens that the target has still to read before it decodes, and has read.
        drafts: Of the tree that its next step scores.
    """

    arrival: float
    prompt: int
    output: int
    acceptance: tuple[float, ...]
    number: int = 0
    unread: int = 0
    read: int = 0
    emitted: int = 0
    drafts: int = 0
    first: float = 0.0
    last: float = 0.0


def poisson(
    rate: float, count: int, acceptance: Any, prompt: Any = 64, output: int = 96, rng: Any = 0
) -> list[Request]:
    """Requests that arrive at random.

    Acceptance and length of prompts may be functions of a request's place, from 0 to 1.
    """

    def each(value: Any) -> list[Any]:
        return [value(n / count) if callable(value) else value for n in range(count)]

    rng = np.random.default_rng(rng)
    arrivals = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    outputs = (8 + rng.exponential(output - 8, count).astype(int)).tolist()
    prompts = [8 + int(rng.exponential(length)) for length in each(prompt)]
    return list(map(Request, arrivals, prompts, outputs, each(acceptance), range(count)))


@dataclass
class Server:
    """Continuous batching with chunked prompts; drafts by batch size from a table.

    What it tells of its steps' times is noisy. Its clock is not: so servers differ by their
    drafts alone.

    Attributes:
        tree: What it drafts prefixes of.
        machine: How long its steps take.
        lookup: Drafts by batch size.
        observe: Is told of each step; None: a server whose table stays.
        most_running, budget, slots: Requests at once, tokens of a step, and of the KV cache.
    """

    tree: TokenTree
    machine: Machine
    lookup: Sequence[int]
    observe: Callable[..., None] | None = None
    most_running: int = 32
    budget: int = 512
    slots: int = 1 << 40
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    clock: float = 0.0
    preemptions: int = 0
    history: list[int] = field(default_factory=list)

    def serve(self, trace: Sequence[Request]) -> list[Request]:
        """Serves a trace to its end; returns it, with the times of first and last tokens."""
        self._depths = np.maximum.accumulate(self.tree.depths).tolist()
        waiting, running = deque(trace), list[Request]()
        for request in waiting:
            request.unread = request.prompt
        before = -1
        while waiting or running:
            if not running:
                self.clock = max(self.clock, waiting[0].arrival)
            preempted = self._preempt(running, waiting)
            while not preempted and waiting and self._fits(waiting[0], running):
                running.append(waiting.popleft())
            scheduled = self._schedule(running)
            drafts = self.lookup[len(scheduled)]
            decoding = [r for r, tokens in scheduled if r.unread == 0]
            prompts = sum(tokens for r, tokens in scheduled if r.unread)
            rows = prompts + len(decoding) + sum(r.drafts for r in decoding)
            context = sum(r.read for r, _ in scheduled)
            for r, tokens in scheduled:
                if r.unread:
                    r.read, r.unread = r.read + tokens, r.unread - tokens
                    if r.unread == 0:
                        decoding.append(r)
            seconds = self.machine.seconds(
                self._depths[drafts], drafts, len(decoding), rows, prompts, context
            )
            self.clock += seconds
            noise = self.rng.lognormal(0, self.machine.noise)
            noise *= 3 if self.rng.random() < self.machine.disturbed else 1
            drafting = self.machine.drafting(self._depths[drafts], drafts, len(decoding), prompts)
            gained, paths = self._verify([r for r in decoding if r.drafts])
            for r in decoding:
                if r.emitted == 0:
                    r.first = self.clock
                r.emitted, r.read = r.emitted + 1, r.read + 1
                r.last, r.drafts = self.clock, drafts
            if self.observe is not None:
                self.observe(
                    batch_size=len(scheduled), drafts=drafts, is_steady=drafts == before,
                    seconds=seconds * noise, drafting=drafting * noise, paths=paths,
                    gained=gained, prompts=prompts, context=context, preempted=preempted,
                )  # fmt: skip
            before = drafts
            self.history.append(drafts)
            running = [r for r in running if r.emitted < r.output]
        return list(trace)

    def _fits(self, request: Request, running: list[Request]) -> bool:
        if request.arrival > self.clock or len(running) == self.most_running:
            return False
        return not running or self._held(running) + request.unread < self.slots

    def _held(self, running: list[Request]) -> int:
        """Slots of the KV cache: what was read, trees that are scored, and those to be grown."""
        drafts = self.lookup[len(running)]
        return sum(r.read + r.unread + r.drafts + 1 + drafts for r in running)

    def _preempt(self, running: list[Request], waiting: deque[Request]) -> int:
        """Requests that lose their slots, the latest first, until the others fit."""
        preempted = 0
        while len(running) > 1 and self._held(running) > self.slots:
            request = running.pop()
            request.unread, request.read, request.drafts = request.prompt + request.emitted, 0, 0
            waiting.appendleft(request)
            preempted += 1
        self.preemptions += preempted
        return preempted

    def _schedule(self, running: list[Request]) -> list[tuple[Request, int]]:
        """Requests of a step, and their tokens: those that decode first, then prompts."""
        left = self.budget - sum(1 + r.drafts for r in running if r.unread == 0)
        scheduled = []
        for r in running:
            tokens = min(r.unread, left) if r.unread else 1 + r.drafts
            if tokens > 0:
                scheduled.append((r, tokens))
                left -= tokens if r.unread else 0
        return scheduled

    def _verify(self, drafted: list[Request]) -> tuple[int, bytes]:
        """Counts accepted nodes of requests with trees.

        Returns:
            Those that users receive, and the paths, see `paths_of`.
        """
        if not drafted:
            return 0, b""
        places = [(r.number * 7919 + r.emitted * 977) % _WALKS for r in drafted]  # in any server
        sizes = np.array([r.drafts for r in drafted])
        each = zip(drafted, places, strict=True)
        walks = np.stack([walks_of(self.tree, r.acceptance)[place] for r, place in each])
        accepted = np.where(walks <= sizes[:, None], walks, -1)
        gained = 0
        for r, tokens in zip(drafted, (accepted >= 0).sum(axis=1).tolist(), strict=True):
            gained += min(tokens, r.output - r.emitted - 1)
            r.emitted, r.read = r.emitted + tokens, r.read + tokens
        if self.observe is None:
            return gained, b""
        return gained, paths_of(self.tree, accepted, sizes + 1).tobytes()


class Seen(NamedTuple):
    """What users saw of the requests after the first quarter."""

    seconds_per_token: float
    """From a request's first token on, in the mean over requests."""
    tokens_per_second: float
    """Since the first of these requests came."""
    drained_per_second: float
    """While the second and the third quarter ended, if all come at once."""

    @classmethod
    def of(cls, served: Sequence[Request]) -> Seen:
        """Takes a trace that was served."""
        skipped = len(served) // 4
        rest = served[skipped:]
        waits = [(r.last - r.first) / (r.emitted - 1) for r in rest if r.emitted > 1]
        ended = sorted(served, key=lambda request: request.last)
        first, last = ended[skipped], ended[-skipped - 1]
        drained = sum(request.output for request in ended[skipped + 1 : -skipped])
        tokens = sum(request.output for request in rest)
        since = ended[-1].last - rest[0].arrival
        return cls(float(np.mean(waits)), tokens / since, drained / (last.last - first.last))
