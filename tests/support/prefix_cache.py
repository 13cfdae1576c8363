"""A small engine with a prefix cache, which knows what the draft's cache really holds.

Every step it lets requests come, go and be preempted as vLLM's scheduler does, in a
pool of few blocks, so that they are shared, evicted and given out again. Whoever is
tested says what the draft reads; the engine then looks whether all that this pass
attends to was written, for these very tokens.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Protocol

BLOCK = 4
POOL = 24
SLOTS = 4
DEPTH = 2  # most drafts that a step accepts
DRAFTS = 3  # that a step may have: also the lookahead of allocations
CHUNK = 7  # most tokens of a prompt per step
LONGEST = 40


@dataclass
class Request:
    """A request; `computed` of its `tokens` are in the target's cache.

    With more than `most` committed tokens it can use no tree.
    """

    name: str
    tokens: list[int]
    prompt: int
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    rejected: int = 0  # drafts of its last step that the scheduler still counts as accepted
    most: int = LONGEST


@dataclass(frozen=True)
class Scheduled:
    """What one step did with a request, `computed` tokens of which were there before."""

    request: Request
    computed: int
    drafts: int
    prefilling: bool
    rejected_before: int
    sampled: list[int]

    @property
    def num_scheduled(self) -> int:
        """Tokens in the target's forward, drafts included."""
        accepted = max(len(self.sampled) - 1, 0)
        return self.request.computed - self.computed - accepted + self.drafts


class Reader(Protocol):
    """What is tested: what the draft reads of each request."""

    def start(self, request: Request) -> None: ...
    def extend(self, request: Request, blocks: list[int]) -> None: ...
    def finish(self, request: Request) -> None: ...
    def read(
        self, batch: list[Scheduled], drafting: bool, budget: int
    ) -> dict[str, tuple[int, int]]: ...


class Engine:
    """Steps, and what is cached where."""

    def __init__(self, random: Random, reader: Reader) -> None:
        self.random, self.reader = random, reader
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.free = list(range(1, POOL))  # the first is vLLM's null block
        self.users = [0] * POOL
        self.prefixes: dict[tuple[int, ...], int] = {}  # the prefix cache
        self.draft_keys: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> prefix
        self.names = 0
        self.hits = 0

    def step(self) -> None:
        """One step of the engine, with or without a pass of the draft."""
        for request in [r for r in self.running if self.random.random() < 0.1]:
            self._release(request)
            if self.random.random() < 0.5:
                self.reader.finish(request)
            else:
                self.waiting.insert(0, request)
        if self.random.random() < 0.7:
            self.waiting.append(self._new_request())
        batch = [self._schedule(request) for request in list(self.running)]
        while self.waiting and len(self.running) < SLOTS and self._admit(self.waiting[0]):
            batch.append(self._schedule(self.waiting.pop(0)))
        ran = [scheduled for scheduled in batch if scheduled is not None]
        self.random.shuffle(ran)
        drafting = self.random.random() < 0.6
        self._check(self.reader.read(ran, drafting, self.random.choice([CHUNK, 20, 80])))
        for scheduled in ran:
            self._share(scheduled.request)

    def _new_request(self) -> Request:
        """Prompts begin with one of two documents, so that they share blocks."""
        document = [self.random.randrange(2)] * self.random.randrange(20)
        tail = [self.random.randrange(2) for _ in range(self.random.randrange(1, 4))]
        self.names += 1
        prompt = len(document + tail)
        most = self.random.choice([0, prompt + self.random.randrange(1, 8), LONGEST - 4])
        return Request(str(self.names), document + tail, prompt, most=most)

    def _admit(self, request: Request) -> bool:
        """Gives a request a slot and what the cache has of it, if there is room."""
        hit: list[int] = []
        while (end := (len(hit) + 1) * BLOCK) < len(request.tokens):
            if (block := self.prefixes.get(tuple(request.tokens[:end]))) is None:
                break
            hit.append(block)
        used = [block for block in hit if self.users[block] == 0]
        if len(self.free) - len(used) < (CHUNK + DRAFTS) // BLOCK + 2:
            return False
        for block in hit:
            self._use(block)
        taken = {other.slot for other in self.running}
        request.slot = min(set(range(SLOTS)) - taken)
        request.blocks, request.computed, request.rejected = hit, len(hit) * BLOCK, 0
        request.prompt = len(request.tokens)  # a resumed one reads all it had
        self.hits += len(hit)
        self.running.append(request)
        return True

    def _schedule(self, request: Request) -> Scheduled | None:
        starts = len(request.blocks) * BLOCK == request.computed
        prefilling = request.computed < request.prompt
        drafts = 0 if prefilling else self.random.randrange(DRAFTS + 1)
        chunk = min(request.prompt - request.computed, self.random.randrange(1, CHUNK + 1))
        count = chunk if prefilling else 1
        new = self._allocate(request, request.computed + count + drafts + DRAFTS)
        if new is None or len(request.tokens) > LONGEST:
            self._release(request)
            self.reader.finish(request)
            return None
        if starts:
            self.reader.start(request)
        elif new:
            self.reader.extend(request, new)
        computed, before = request.computed, request.rejected
        request.computed += count
        self._share(request)
        sampled: list[int] = []
        if request.computed >= request.prompt:
            accepted = self.random.randrange(min(drafts, DEPTH) + 1)
            sampled = [self.random.randrange(2) for _ in range(accepted + 1)]
            request.tokens += sampled
            request.computed += accepted
            request.rejected = drafts - accepted
        return Scheduled(request, computed, drafts, prefilling, before, sampled)

    def _allocate(self, request: Request, tokens: int) -> list[int] | None:
        """Blocks for this many tokens in all; their old contents leave the prefix cache."""
        count = max(-(-tokens // BLOCK) - len(request.blocks), 0)
        if count > len(self.free):
            return None
        new = self.free[:count]
        for block in new:
            self._use(block)
            self.prefixes = {prefix: b for prefix, b in self.prefixes.items() if b != block}
        request.blocks = request.blocks + new
        return new

    def _use(self, block: int) -> None:
        self.users[block] += 1
        if block in self.free:
            self.free.remove(block)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)
        request.blocks = []

    def _share(self, request: Request) -> None:
        """Shares a prompt's blocks as soon as it is scheduled, others once they are known."""
        for index in range(request.computed // BLOCK):
            prefix = tuple(request.tokens[: (index + 1) * BLOCK])
            self.prefixes.setdefault(prefix, request.blocks[index])

    def _check(self, reads: dict[str, tuple[int, int]]) -> None:
        """One pass writes the keys of all requests, then each attends to all before its last."""
        reading = [(r, reads[r.name]) for r in self.running if r.name in reads]
        for request, (start, end) in reading:
            for position in range(start, end):
                self.draft_keys[_place(request, position)] = tuple(request.tokens[: position + 1])
        for request, (_, end) in reading:
            for position in range(end):
                held = self.draft_keys.get(_place(request, position))
                assert held == tuple(request.tokens[: position + 1]), (request, position)


def _place(request: Request, position: int) -> tuple[int, int]:
    return request.blocks[position // BLOCK], position % BLOCK
