"""Which blocks the draft has filled, and where requests that share them begin to read."""

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import request as vllm_request
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from sequoia_vllm.engine.runner.draft_blocks import DraftBlocks
from sequoia_vllm.engine.v2.drafting import draft_progress

BLOCK = 4
POOL = 24
SLOTS = 4
DEPTH = 2  # most drafts that a step accepts
DRAFTS = 3  # that a step may have: also the lookahead of allocations
CHUNK = 7  # most tokens of a prompt per step
LONGEST = 40
init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)
DEPTHS = [min(drafts, DEPTH) for drafts in range(DRAFTS + 1)]


def read_by_first(groups: dict[int, int], given: list[list[int]], tokens: int) -> DraftBlocks:
    """Blocks of which a request, named first, has read so many tokens."""
    blocks = DraftBlocks(groups)
    blocks.start("first", given, 0)
    blocks.read("first", 0, tokens)
    return blocks


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


class Request(vllm_request.Request):
    """A request of vLLM's. With more than `most` committed tokens it can use no tree."""

    def __init__(self, name: str, prompt: list[int], most: int = LONGEST) -> None:
        super().__init__(name, prompt, SamplingParams(), None, block_hasher=HASHER)
        self.most, self.slot = most, -1
        self.prompt = 0  # tokens that it reads before it samples
        self.rejected = 0  # drafts of its last step that the scheduler still counts as accepted


@dataclass(frozen=True)
class Scheduled:
    """What one step did with a request, of which the scheduler counted so many tokens before."""

    request: Request
    counted: int
    tokens: int  # in the target's forward, drafts included
    drafts: int
    prefilling: bool
    sampled: list[int]


class Engine:
    """A small engine with vLLM's prefix cache, which knows what the draft's cache really holds.

    Every step it lets requests come, go and be preempted as vLLM's scheduler does, in a
    pool of few blocks, so that they are shared, evicted and given out again. The reader
    says what the draft reads; the engine then looks whether all that this pass attends to
    was written, for these very tokens.
    """

    def __init__(self, random: Random, reader: "V2Reader") -> None:
        self.random, self.reader = random, reader
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        layers = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(POOL, [], [KVCacheGroupSpec(["draft"], layers)])
        self.cache = KVCacheManager(config, 2 * LONGEST, BLOCK, BLOCK)
        self.draft_keys: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> prefix
        self.names = 0

    def step(self) -> None:
        """One step of the engine, with or without a pass of the draft."""
        for request in list(self.running):
            has_all = request.num_tokens > LONGEST
            if has_all or self.random.random() < 0.1:
                self._release(request)
                if not has_all and self.random.random() < 0.5:
                    self.waiting.insert(0, request)
        if self.random.random() < 0.7:
            self.waiting.append(self._new_request())
        ran = list(filter(None, map(self._schedule, list(self.running))))
        while self.waiting and len(self.running) < SLOTS:
            if (scheduled := self._schedule(self.waiting[0])) is None:
                break
            ran.append(scheduled)
            self.waiting.pop(0)
        self.random.shuffle(ran)
        drafting = self.random.random() < 0.6
        self._check(self.reader.read(ran, drafting, self.random.choice([CHUNK, 20, 80])))

    def _new_request(self) -> Request:
        """Prompts begin with one of two documents, so that they share blocks."""
        document = [self.random.randrange(2)] * self.random.randrange(20)
        tail = [self.random.randrange(2) for _ in range(self.random.randrange(1, 4))]
        self.names += 1
        prompt = document + tail
        most = self.random.choice([0, len(prompt) + self.random.randrange(1, 8), LONGEST - 4])
        return Request(str(self.names), prompt, most)

    def _schedule(self, request: Request) -> Scheduled | None:
        """A step of this request; where there is no room, none, and one that runs ends."""
        starts = request not in self.running
        hit, cached = self.cache.get_computed_blocks(request)[:2] if starts else (None, 0)
        if starts:
            request.prompt = request.num_tokens  # a resumed one reads all it had
        computed = request.num_computed_tokens + cached
        counted = computed + request.rejected
        prefilling = computed < request.prompt
        drafts = 0 if prefilling else self.random.randrange(DRAFTS + 1)
        chunk = min(request.prompt - computed, self.random.randrange(1, CHUNK + 1))
        count = chunk if prefilling else 1
        new = self.cache.allocate_slots(request, count + drafts, cached, hit, DRAFTS)
        if new is None:
            if not starts:
                self._release(request)
            return None
        progress = self.reader.progress
        if starts:
            request.slot = min(set(range(SLOTS)) - {other.slot for other in self.running})
            self.running.append(request)
            progress.start(request.slot, cached, self.cache.get_block_ids(request.request_id))
        else:
            progress.extend(request.slot, new.get_block_ids())
        request.num_computed_tokens = computed + count
        sampled: list[int] = []
        if request.num_computed_tokens >= request.prompt:
            accepted = self.random.randrange(min(drafts, DEPTH) + 1)
            sampled = [self.random.randrange(2) for _ in range(accepted + 1)]
            request.append_output_token_ids(sampled)
            request.num_computed_tokens += accepted
            request.rejected = drafts - accepted
        return Scheduled(request, counted, count + drafts, drafts, prefilling, sampled)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.free(request)
        request.num_computed_tokens = request.rejected = 0

    def _check(self, reads: dict[str, tuple[int, int]]) -> None:
        """One pass writes the keys of all requests, then each attends to all before its last."""
        reading = [(r, reads[r.request_id]) for r in self.running if r.request_id in reads]
        for request, (start, end) in reading:
            for position in range(start, end):
                self.draft_keys[self._place(request, position)] = _prefix(request, position)
        for request, (_, end) in reading:
            for position in range(end):
                held = self.draft_keys.get(self._place(request, position))
                assert held == _prefix(request, position), (request, position)

    def _place(self, request: Request, position: int) -> tuple[int, int]:
        [blocks] = self.cache.get_block_ids(request.request_id)
        return blocks[position // BLOCK], position % BLOCK


def _prefix(request: Request, position: int) -> tuple[int, ...]:
    return tuple(request.all_token_ids[: position + 1])


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
        step = SimpleNamespace(
            idx_mapping_np=slots,
            num_computed_tokens_np=np.array([s.counted for s in batch], dtype=np.int32),
            num_scheduled_tokens=np.array([s.tokens for s in batch], dtype=np.int32),
            num_draft_tokens_per_req=np.array([s.drafts for s in batch], dtype=np.int32),
            is_prefilling_np=np.array([s.prefilling for s in batch], dtype=bool),
        )
        self.progress.gain(step)
        if not (batch and drafting):
            return {}
        committed = self.progress.committed_at_least(slots)
        for scheduled, at_least in zip(batch, committed.tolist(), strict=True):
            if scheduled.sampled:
                assert at_least <= scheduled.request.num_computed_tokens + 1
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
            end = request.num_computed_tokens + bool(scheduled.sampled)
            count = max(min(end - start, bound), 0)
            self.progress.read[request.slot] = start + count
            drafts = bool(scheduled.sampled) and start + count == end
            if count > 0 or drafts:
                reads[request.request_id] = (start, start + count)
        return reads


def starting(reader, name, prompt, cached, blocks, slot):
    """A step of a request whose whole prompt runs in it, and which samples a token."""
    request = Request(name, list(range(prompt)))
    request.append_output_token_ids(0)
    request.slot, request.num_computed_tokens = slot, prompt
    reader.progress.start(slot, cached, [blocks])
    return Scheduled(request, cached, prompt - cached, 0, True, [0])


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
