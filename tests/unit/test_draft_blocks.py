"""Which blocks the draft has filled, and where requests that share them begin to read."""

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.engine.runner.draft_blocks import DraftBlocks
from sequoia_vllm.engine.v2.drafting import draft_progress

BLOCK = 4
POOL = 24
SLOTS = 4
DEPTH = 2  # most drafts that a step accepts
DRAFTS = 3  # that a step may have: also the lookahead of allocations
CHUNK = 7  # most tokens of a prompt per step
LONGEST = 40
DEPTHS = [min(drafts, DEPTH) for drafts in range(DRAFTS + 1)]


def read_by_first(groups: dict[int, int], given: list[list[int]], tokens: int) -> DraftBlocks:
    """Blocks of which a request, named first, has read so many tokens."""
    blocks = DraftBlocks(groups)
    blocks.start("first", given, 0)
    blocks.read("first", 0, tokens)
    return blocks


def test_blocks_are_filled_when_all_of_them_is_read():
    blocks = read_by_first({0: 4}, [[7, 8, 9]], 6)
    blocks.start("second", [[7, 8, 5]], 8)
    assert blocks.filled_tokens("second", 8) == 4
    blocks.read("first", 6, 9)
    assert blocks.filled_tokens("second", 8) == 8
    assert blocks.filled_tokens("second", 4) == 4


def test_blocks_that_are_given_out_anew_hold_nothing():
    blocks = read_by_first({0: 4}, [[7, 8]], 8)
    blocks.forget("first")
    blocks.start("second", [[7, 8]], 4)  # finds the first of them, gets the other anew
    assert blocks.filled_tokens("second", 8) == 4
    blocks.extend("second", [[9]])
    blocks.read("second", 4, 12)
    blocks.start("third", [[7, 8, 9]], 12)
    assert blocks.filled_tokens("third", 12) == 12
    blocks.extend("third", [[8]])  # as if it had been evicted meanwhile
    assert blocks.filled_tokens("third", 12) == 4


def test_every_group_with_layers_of_the_draft_counts():
    given = [[1], [2, 3, 4, 5], [6, 7]]
    blocks = read_by_first({1: 4, 2: 8}, given, 12)
    assert blocks.step == 4
    blocks.start("second", given, 16)
    assert blocks.filled_tokens("second", 16) == 8  # of group 1 it would be 12


def test_null_blocks_before_a_window_count_as_filled():
    """vLLM puts its first block in their place; whatever happens, nobody has to fill it."""
    blocks = read_by_first({0: 4, 1: 4}, [[1, 2, 3], [4, 5, 6]], 12)
    blocks.start("second", [[1, 2, 3], [0, 0, 6]], 12)
    assert blocks.filled_tokens("second", 12) == 12
    blocks.extend("second", [[7], [0]])
    blocks.start("third", [[1, 2, 3, 8], [0, 0, 0, 9]], 0)
    assert blocks.filled_tokens("third", 16) == 0  # its blocks are new, but for those
    blocks.start("fourth", [[1, 2, 3], [0, 0, 6]], 12)
    assert blocks.filled_tokens("fourth", 12) == 0
    blocks.read("fourth", 0, 12)
    assert blocks.filled_tokens("second", 12) == 12


# -- V2, against an engine that knows what the draft's cache holds. (V1: test_cache_contents.py)


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


class Engine:
    """A small engine with a prefix cache, which knows what the draft's cache really holds.

    Every step it lets requests come, go and be preempted as vLLM's scheduler does, in a
    pool of few blocks, so that they are shared, evicted and given out again. The reader
    says what the draft reads; the engine then looks whether all that this pass attends to
    was written, for these very tokens.
    """

    def __init__(self, random: Random, reader: "V2Reader") -> None:
        self.random, self.reader = random, reader
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.free = list(range(1, POOL))  # the first is vLLM's null block
        self.users = [0] * POOL
        self.prefixes: dict[tuple[int, ...], int] = {}  # the prefix cache
        self.draft_keys: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> prefix
        self.names = 0

    def step(self) -> None:
        """One step of the engine, with or without a pass of the draft."""
        for request in [r for r in self.running if self.random.random() < 0.1]:
            self._release(request)
            if self.random.random() < 0.5:
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
            return None
        progress = self.reader.progress
        if starts:
            progress.start(request.slot, request.computed, [request.blocks])
        elif new:
            progress.extend(request.slot, [new])
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


class Staged:
    """vLLM's `StagedWriteTensor`, whose writes are a Triton kernel's."""

    def __init__(self, size, dtype, device, max_concurrency):
        self.gpu = torch.full((size,), 99, dtype=dtype, device=device)
        self.staged = []

    def stage_write_elem(self, index, value):
        self.staged.append((index, value))

    def apply_write(self):
        assert len({index for index, _ in self.staged}) == len(self.staged)  # they race
        for index, value in self.staged:
            self.gpu[index] = value
        self.staged.clear()


class V2Reader:
    """`ModelDraftProgress` among requests of an `Engine` whose outcomes are known a step late."""

    def __init__(self):
        self.progress = draft_progress.ModelDraftProgress(
            SLOTS, DEPTHS, unknown_drafts=DRAFTS, device=torch.device("cpu")
        )
        self.progress.use_cache({0: BLOCK})

    def read(self, batch, drafting, budget):
        slots = np.array([scheduled.request.slot for scheduled in batch], dtype=np.intp)
        computed = [s.computed + s.rejected_before for s in batch]
        step = SimpleNamespace(
            idx_mapping_np=slots,
            num_computed_tokens_np=np.array(computed, dtype=np.int32),
            num_scheduled_tokens=np.array([s.num_scheduled for s in batch], dtype=np.int32),
            num_draft_tokens_per_req=np.array([s.drafts for s in batch], dtype=np.int32),
            is_prefilling_np=np.array([s.prefilling for s in batch], dtype=bool),
        )
        self.progress.gain(step)
        if not (batch and drafting):
            return {}
        committed = self.progress.committed_at_least(slots)
        for scheduled, at_least in zip(batch, committed.tolist(), strict=True):
            if scheduled.sampled:
                assert at_least <= scheduled.request.computed + 1
        reading = np.array([scheduled.request.most for scheduled in batch]) >= committed
        most = self.progress.most_unread(slots[reading])
        bounds = self.progress.take_bounds(slots, reading, budget)
        assert bounds.sum() <= budget
        assert bounds.max() <= most
        assert not bounds[~reading].any()
        reads = {}
        for scheduled, bound in zip(batch, bounds.tolist(), strict=True):
            # As `kernels.begin_drafting` does it.
            request = scheduled.request
            start = int(self.progress.read[request.slot])
            end = request.computed + bool(scheduled.sampled)
            count = max(min(end - start, bound), 0)
            self.progress.read[request.slot] = start + count
            drafts = bool(scheduled.sampled) and start + count == end
            if count > 0 or drafts:
                reads[request.name] = (start, start + count)
        return reads


def starting(reader, name, prompt, cached, blocks, slot, **more):
    """A step of a request whose whole prompt runs in it, and which samples a token."""
    tokens = list(range(prompt))
    request = Request(name, [*tokens, 0], prompt, slot, blocks, cached, **more)
    reader.progress.start(slot, cached, [blocks])
    request.computed = prompt
    return Scheduled(request, cached, 0, True, 0, [0])


@pytest.fixture(autouse=True, scope="module")
def no_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_progress, "StagedWriteTensor", Staged)
        yield


@pytest.mark.parametrize(
    ("budget", "read"),
    [
        (40, {"a": (0, 10), "b": (8, 11)}),
        (12, {"a": (0, 10), "b": (8, 10)}),
        (8, {"a": (0, 8)}),  # and the other waits, with nothing to start from
    ],
)
def test_a_prompt_that_two_requests_share_is_read_once(budget, read):
    """The second finds blocks that the first gets, computes and fills in the same step."""
    reader = V2Reader()
    first = starting(reader, "a", 9, 0, [1, 2, 3], 1)
    second = starting(reader, "b", 10, 8, [1, 2, 4], 0)
    assert reader.read([second, first], True, budget) == read


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_pass_attends_to_keys_that_were_not_written(seed):
    engine = Engine(Random(seed), V2Reader())
    for _ in range(40):
        engine.step()


def test_requests_that_can_use_no_tree_are_not_read():
    """What they leave in the prefix cache is read for the first that drafts."""
    reader = V2Reader()
    assert reader.read([starting(reader, "a", 9, 0, [1, 2, 3], 1, most=0)], True, 40) == {}
    drafted = starting(reader, "b", 10, 8, [1, 2, 4], 0)
    assert reader.read([drafted], True, 40) == {"b": (0, 11)}
